"""A tensor made of tensors, as quantized weights and optimizer state are, and an optimizer that keeps its state in some."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Packed(torch.Tensor):
    """8-bit codes, a scale for each block, and a table that may be shared."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    block: int

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int, dtype: torch.dtype
    ) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale, self.table, self.block = codes, scale, table, block

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, block={self.block})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype]]:
        return ["codes", "scale", "table"], (self.block, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Packed:
        raise AssertionError("a load makes no tensor of what a checkpoint says")

    @classmethod
    def of(cls, values: torch.Tensor, block: int = 4, table: torch.Tensor | None = None) -> Packed:
        """Values, as near as 8 bits come."""
        flat = values.detach().float().reshape(-1, block)
        scale = flat.abs().amax(1).clamp(min=1e-12) / 127
        codes = (flat / scale[:, None]).round().to(torch.int8).view(values.shape)
        return cls(codes, scale, torch.arange(3.0) if table is None else table, block, values.dtype)

    def plain(self) -> torch.Tensor:
        """The values."""
        flat = self.codes.float().view(-1, self.block) * self.scale[:, None]
        return flat.view(self.codes.shape).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default):
            one = args[0]
            new = Packed(func(one.codes), func(one.scale), func(one.table), one.block, one.dtype)
            return return_and_correct_aliasing(func, args, kwargs, new)
        if func is aten.view.default:  # DTensors need it
            one = args[0]
            return Packed(one.codes.view(args[1]), one.scale, one.table, one.block, one.dtype)
        if func is aten._to_copy.default:
            one = args[0]
            return Packed(one.codes.clone(), one.scale.clone(), one.table.clone(), one.block, kwargs["dtype"])
        if func is aten.copy_.default:
            to, given = args[0], args[1] if isinstance(args[1], Packed) else Packed.of(args[1], args[0].block)
            to.codes.copy_(given.codes)
            to.scale.copy_(given.scale)
            return to
        args = [each.plain() if isinstance(each, Packed) else each for each in args]
        return func(*args, **kwargs)

    def parts(self) -> list[torch.Tensor]:
        """What it is made of."""
        return [self.codes, self.scale, self.table]


class PackedMomentum(torch.optim.Optimizer):
    """Momentum in 8 bits, made at the first step as torchao does, with a table that all parameters share."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.arange(5.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, with noise of torch's default generator."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Packed.of(torch.zeros_like(parameter), table=self.table)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                momentum = state["momentum"].plain().float().lerp(parameter.grad.float(), 0.1)
                state["momentum"].copy_(momentum + 1e-3 * torch.rand_like(momentum))
                parameter.sub_(state["momentum"].plain(), alpha=group["lr"])
