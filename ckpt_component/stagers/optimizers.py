"""Find the torch optimizers in the argument of `guard`: one, several, or wrapped by a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointTypeError

#: Attributes that hold the wrapped or chained optimizers: of Accelerate, DeepSpeed and Apex, and of Megatron.
_INSIDE = ("optimizer", "chained_optimizers")


def optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """Return all torch optimizers in a value, each once.

    A wrapper that derives from torch's class may have no hooks, so the wrapped optimizer is preferred.

    Raises:
        CheckpointTypeError: the value, or one of its items, has no optimizer; the text says what to pass
    """
    return list({id(optimizer): optimizer for optimizer in _inside(given, [])}.values())


def _inside(given: Any, outer: list[Any]) -> list[torch.optim.Optimizer]:
    items = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(items, (list, tuple)) and items:
        return [optimizer for item in items for optimizer in _inside(item, outer)]
    inner = next((getattr(given, name) for name in _INSIDE if getattr(given, name, None) is not None), None)
    if inner is not None and all(inner is not wrapper for wrapper in [*outer, given]):
        return _inside(inner, [*outer, given])
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    raise CheckpointTypeError(
        "guard() takes a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`, not "
        f"{_kind(given)}; pass what changes the weights: guard(optimizer)."
    )


def _kind(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    empty = "an empty " if isinstance(given, (list, tuple, Mapping)) else "a "
    return f"{empty}{type(given).__name__}"
