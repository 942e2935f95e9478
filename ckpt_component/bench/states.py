"""The states that are saved: made the same on every run."""

from __future__ import annotations

import torch


def make_state(name: str) -> dict[str, torch.Tensor]:
    """A state by name.

    Args:
        name: `many_small` (20,000 tensors of 1 to 64 KB, about 0.67 GB), `large` (592 tensors, 1.5 GB), or `tiny`.
    """
    generator = torch.Generator().manual_seed(1)
    if name == "many_small":
        sizes = torch.randint(256, 16384, (20_000,), generator=generator).tolist()
    elif name == "large":
        sizes = [630_000] * 592
    elif name == "tiny":
        sizes = [1000] * 20
    else:
        raise ValueError(f"There is no state {name!r}; use {', '.join(STATES)}.")
    return {f"layer.{number}.weight": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


STATES = ("many_small", "large", "tiny")


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())
