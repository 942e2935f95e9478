"""Tensors made of tensors: quantized weights and optimizer state that torch sees as one tensor.

Their class names its inner tensors by `__tensor_flatten__`, torch's protocol for such classes. A checkpoint has each of
these under a key of its own, and beside them, under `CONTEXT`, what the class would need to make the whole again.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import Any

import torch

from .dense_tensors import has_plain_bytes
from .shards import is_spread, local_parts

#: The key beside the inner tensors for what is not a tensor; named after the method that takes it.
CONTEXT = "__tensor_unflatten__"


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own, and its class says which tensors it is made of.

    DTensors, jagged tensors and results that a collective still has to deliver say so too, and are not meant.
    """
    return (
        hasattr(type(tensor), "__tensor_flatten__")
        and not has_plain_bytes(tensor)
        and not is_spread(tensor)
        and not tensor.is_nested
        and not _is_awaited(tensor)
    )


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor is made of, by name; empty for any other tensor."""
    if not is_made_of_tensors(tensor):
        return {}
    whole: Any = tensor
    return {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of this rank that have the memory of a tensor: itself, its local parts, or what these are made of."""
    dense, waiting = [], [part for part, _ in local_parts(tensor, "a tensor")]
    while waiting:
        part = waiting.pop()
        if has_plain_bytes(part):
            dense.append(part)
        elif parts := parts_of(part):
            waiting += [local for each in parts.values() for local, _ in local_parts(each, "a tensor")]
        else:
            dense.append(part)
    return dense


def context_of(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What a tensor is, beside the tensors that it is made of, as plain data; nothing is made of it here.

    Returns:
        Names and values, as pairs, because a dict would be flattened. `class`: its name. `context`, `shape` and
        `stride`: what its `__tensor_unflatten__` takes. `dtype`: as it says.
    """
    whole: Any = tensor
    return (
        ("class", _name_of(type(tensor))),
        ("context", _described(whole.__tensor_flatten__()[1])),
        ("shape", tuple(tensor.shape)),
        ("stride", tuple(tensor.stride())),
        ("dtype", tensor.dtype),
    )


def read_context(value: Any) -> dict[str, Any] | None:
    """What a checkpoint has from `context_of`, by name; None: it is something else."""
    is_valid = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return {name: each for name, each in value if isinstance(name, str)} if is_valid else None


def _described(value: Any) -> Any:
    """A context with enums, dataclasses, functions and classes by name; the rest as it is, to be encoded or refused."""
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _name_of(type(value)), **fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": _name_of(type(value)), **{name: _described(each) for name, each in value._asdict().items()}}
    if isinstance(value, (type, types.FunctionType)):
        return _name_of(value)
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    if isinstance(value, dict):
        return {name: _described(each) for name, each in value.items()}
    return value


def _name_of(value: type | types.FunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_awaited(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)
