"""Layers whose parameter is quantized as bitsandbytes does it, and modules whose state has values of changing shape."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

#: The table that all double quantizations share, of which each state has a copy.
_SHARED = torch.linspace(-1, 1, 16)


class FourBitState:
    """How a packed weight is to be read."""

    def __init__(self, values: torch.Tensor, *, double: bool) -> None:
        self.shape = values.shape
        scale = values.abs().amax(1) / 7
        self.code, self.absmax, self.offset, self.state2 = torch.arange(16.0), scale, None, None
        if double:
            self.offset = scale.mean()
            self.state2 = inner = FourBitState(torch.ones(2, 2), double=False)
            inner.absmax, inner.code = (scale - self.offset).abs().amax().reshape(1) / 127, _SHARED.clone()
            self.absmax = ((scale - self.offset) / inner.absmax).round().to(torch.int8)

    def described(self) -> dict[str, Any]:
        """All that is no tensor in a state."""
        known: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [*self.shape]}
        if self.offset is not None:
            known |= {"nested_blocksize": 256, "nested_offset": self.offset.item()}
        return known


class FourBitWeight(nn.Parameter):
    """A packed weight with its quantization state."""

    quant_state: FourBitState


class FourBitLayer(nn.Module):
    """A frozen layer that gives what its weight is made of, and does not take it."""

    def __init__(self, *shape: int, double: bool = False) -> None:
        super().__init__()
        values = torch.randn(shape)
        state = FourBitState(values, double=double)
        codes = (values / (values.abs().amax(1, keepdim=True) / 7)).round().to(torch.uint8)
        weight: Any = torch.Tensor._make_subclass(FourBitWeight, codes.view(-1, 1), False)
        weight.quant_state = state
        self.weight = weight

    def scale(self) -> torch.Tensor:
        """The scale of each row."""
        state: FourBitState = self.weight.quant_state
        if state.state2 is None or state.offset is None:
            return state.absmax
        return state.absmax * state.state2.absmax + state.offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signed = self.weight.view(self.weight.quant_state.shape).to(torch.int8).float()
        return torch.as_tensor(x @ (signed * self.scale()[:, None]).T)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state: FourBitState = self.weight.quant_state
        parts = {"absmax": state.absmax, "quant_map": state.code}
        if state.state2 is not None:
            parts |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code.clone()}
        text = json.dumps(state.described()).encode()
        parts["quant_state.bitsandbytes__nf4"] = torch.tensor([*text], dtype=torch.uint8)
        destination.update({f"{prefix}weight.{name}": part for name, part in parts.items()})


class Adapted(nn.Module):
    """A frozen layer and an adapter."""

    def __init__(self, base: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x)) + torch.as_tensor(self.up(self.down(x)))


class Growing(nn.Module):
    """A memory that grows, whose size its own code takes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 3))

    def add(self, rows: int) -> None:
        self.seen = torch.cat([self.seen, torch.randn(rows, 3)])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.seen = self.seen.new_empty(state_dict[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *others)


class Fixed(nn.Module):
    """A buffer of which its own code takes one width only."""

    table: torch.Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(rows, 3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)


class GivesMore(nn.Module):
    """A module that refuses what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm()
