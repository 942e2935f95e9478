"""States for the contracts: every kind of tensor, every byte different from state to state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def example_state(number: int, *, objects: bool = True) -> dict[str, Any]:
    """A state of every kind of tensor, with bytes that depend on its number.

    Args:
        number: below 128
        objects: with values that are not tensors
    """
    generator = torch.Generator().manual_seed(number)
    base = torch.randn(12, 20, generator=generator)
    model = {
        "weight": torch.randn(300, 200, generator=generator),
        "transposed": base.t(),
        "view": base[2:5],
        "column": torch.randn(5, 4, generator=generator)[:, 1],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(number)),
        "half": torch.full((7, 5), number, dtype=torch.bfloat16),
        "bytes": torch.full((9,), number, dtype=torch.uint8),
        "flags": torch.tensor([number % 2 == 0, True]),
        "conjugated": torch.complex(base[0], base[1]).conj(),
    }
    model["tied"] = model["weight"]
    values = {"step": number, "note": f"number {number}", "nested": {1: [number, None], "none": {}}}
    return {"model": model, **(values if objects else {})}


def large_state(number: int) -> dict[str, torch.Tensor]:
    """A state whose copy takes some milliseconds; every byte is the number."""
    return {f"weight{each}": torch.full((2 << 20,), number, dtype=torch.uint8) for each in range(4)}


def change(state: Mapping[str, Any]) -> None:
    """Change every tensor in place, as training does."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.copy_(torch.ones(value.shape).to(value.dtype))
        elif isinstance(value, dict):
            change(value)
        elif isinstance(value, list):
            value.append("changed")


def differences(found: Any, expected: Any, key: str = "state") -> list[str]:
    """The keys at which two states are not the same to the bit."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{key} has other keys"]
        return [text for name in expected for text in differences(found[name], expected[name], f"{key}.{name}")]
    if isinstance(expected, torch.Tensor):
        same = (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and torch.equal(_bytes(found), _bytes(expected))
        )
        return [] if same else [f"{key} has other bytes"]
    return [] if found == expected else [f"{key} is {found!r} instead of {expected!r}"]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().flatten().view(torch.uint8)
