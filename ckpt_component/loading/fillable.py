"""Which tensors a load can fill: all at once, one by one, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..core.formats.contents import Entry
from ..core.state.dense_tensors import BATCH, plain_addresses
from .source import DTYPE_NAMES

_SHAPE, _DTYPE = map(attrgetter, ("shape", "dtype"))


def why_unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled, and what to do; None if it can."""
    if is_lazy(tensor):
        return "is not initialized yet; run the module on one batch before the load"
    if tensor.is_meta:
        return "is on the meta device and has no memory; give the module memory with to_empty(device=...)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is {'nested' if tensor.is_nested else f'sparse ({tensor.layout})'}; load into a dense tensor"
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are the same memory; load into its .contiguous()"
    return None


def addresses_if_matching(entries: Sequence[Entry | None], tensors: Sequence[torch.Tensor]) -> list[int | None] | None:
    """The tensors' addresses, as `plain_addresses`; None if they must be matched one by one.

    That is the case if one has no entry, differs in shape or dtype, or cannot be filled directly.
    """
    if None in entries:
        return None
    addresses: list[int | None] = []
    try:
        for first in range(0, len(tensors), BATCH):
            some, stored = tensors[first : first + BATCH], entries[first : first + BATCH]
            if list(map(_SHAPE, stored)) != list(map(_SHAPE, some)):
                return None
            if list(map(_DTYPE, stored)) != list(map(DTYPE_NAMES.get, map(_DTYPE, some))):
                return None
            addresses += plain_addresses(some)
        if None in addresses:
            for tensor, address in zip(tensors, addresses, strict=True):
                if address is None and why_unfillable(tensor) is not None:
                    return None
    except RuntimeError:  # an uninitialized tensor has no shape
        return None
    return addresses


def memory_of(tensor: torch.Tensor) -> Any:
    """What identifies a tensor's memory and its view of it; None if it has no memory of its own."""
    try:
        return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.data_ptr() else None
    except RuntimeError:  # such as a sparse or an uninitialized tensor
        return None
