"""Tensors of a target: which are what the checkpoint has, and which cannot be filled at all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointLoadError
from ..state.dense_tensors import plain_addresses
from .source import TensorEntry

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def why_unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled, and what to do; None: it can."""
    if is_lazy(tensor):
        return "is not initialized yet; run the module on one batch before the load"
    if tensor.is_meta:
        return "is on the meta device and has no memory; give the module memory with to_empty(device=...)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is {'nested' if tensor.is_nested else f'sparse ({tensor.layout})'}; load into a dense tensor"
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are the same memory; load into its .contiguous()"
    return None


def check_fillable(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor of a target that cannot be filled.

    Raises:
        CheckpointLoadError: with its key.
    """
    why = why_unfillable(tensor)
    if why is not None:
        raise CheckpointLoadError(f"'{key}' in the target {why}.")


def addresses_if_alike(
    entries: Sequence[TensorEntry | None], tensors: Sequence[torch.Tensor]
) -> list[int | None] | None:
    """Where the memory of tensors begins, as `plain_addresses`; None: one needs a look of its own.

    That is one of another shape or dtype than its entry, or without memory that can simply be filled.
    """
    try:
        if any(list(map(of, entries)) != list(map(of, tensors)) for of in (_SHAPE, _DTYPE)):
            return None
        addresses = plain_addresses(tensors)
        if None in addresses:
            for tensor, address in zip(tensors, addresses, strict=True):
                if address is None and why_unfillable(tensor) is not None:
                    return None
    except RuntimeError:  # it has no shape at all
        return None
    return addresses
