"""Whether two values of a state are the same: in kind, dtype, shape and bytes. NaN is the same as itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from .dense_tensors import ORDINARY
from .objects import DEEPEST
from .shards import local_parts
from .tensor_parts import parts_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_value(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are the same; a dict's order does not matter."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same_tensor(one, other)
    if type(one) is not type(other) or depth > DEEPEST:
        return False
    if one is other:
        return True
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other, [depth + 1] * len(one)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, (numpy.ndarray, numpy.generic)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    # A value that equals nothing is NaN; one whose comparison is no truth value says nothing, and counts as different.
    equal = one == other
    return equal is True or (isinstance(one, (float, complex)) and repr(one) == repr(other))


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; of distributed ones, the parts of this rank."""
    if one is other:
        return True
    if ORDINARY.issuperset((type(one), type(other))) and one.dtype == other.dtype and one.shape == other.shape:
        return _same_bytes(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts = local_parts(one, ""), local_parts(other, "")
    if [shard for _, shard in parts[0]] != [shard for _, shard in parts[1]]:
        return False
    return all(_same_bytes(first, second) for (first, _), (second, _) in zip(*parts, strict=True))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) not in ORDINARY and (parts := parts_of(one)):
        others = parts_of(other)
        is_same = type(one) is type(other) and parts.keys() == others.keys()
        return is_same and all(same_tensor(part, others[name]) for name, part in parts.items())
    if one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    other = other.detach().to(one.device)
    return torch.equal(_as_integers(one.detach()), _as_integers(other))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers, which equal themselves even where they are NaN."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.view(_INTEGERS.get(tensor.itemsize, torch.uint8))
