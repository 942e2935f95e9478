"""What the ranks of a job know at a step: each byte says of which job and step it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WEIGHTS = 300


def state_of(job: int, step: int, ranks: int, *, has_base: bool = False, has_more: bool = False) -> dict[str, Any]:
    """What all ranks know together after a step of a job; 0: the target of a restore.

    A base never changes. Of what some have more, some elements change with each step, and all with each fifth one.
    """
    generator = torch.Generator().manual_seed(1000 * job + step)

    def weight(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) if step else torch.zeros(size)

    shared = {"weight": weight(_WEIGHTS), "half": torch.full((5, 5), step, dtype=torch.bfloat16)}
    if has_base:
        shared["base"] = torch.full((17_000,), 1.0 if step else 0.0)
    own = {f"rank{rank}": {"weight": weight(_WEIGHTS), "at": [job, step, rank]} for rank in range(ranks)}
    if has_more:
        generator.manual_seed(step - step % 5)
        shared["slow"] = weight(4000)
        for each in range(step - step % 5, step):
            shared["slow"][each % 17 :: 17] += 1.0
    return {"shared": shared, **own}


def loss_of(step: int) -> float:
    """Of the steps of a life, the first one is the best, until the fifth; a copy, a thousand later, is as good."""
    return {1: 0.5, 5: 0.1}.get(step % 1000, 0.9)


def part_of(rank: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank saves of it: what all have, and its own."""
    return {"shared": state["shared"], f"rank{rank}": state[f"rank{rank}"]}


def said_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Of which job and step a restored state says that it is."""
    job, step, _ = state["rank0"]["at"]
    return job, step


def differences(found: Any, expected: Any, key: str = "") -> Iterator[str]:
    """The keys at which two states are not the same to the bit."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            yield f"{key or 'the state'} has other keys"
            return
        for name in expected:
            yield from differences(found[name], expected[name], f"{key}/{name}")
    elif isinstance(expected, torch.Tensor):
        if not (isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)):
            yield f"{key} has other bytes"
    elif found != expected:
        yield f"{key} is {found!r} and not {expected!r}"
