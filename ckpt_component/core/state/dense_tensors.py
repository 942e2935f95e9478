"""Tensors whose memory holds exactly the bytes to store, and how many of them to examine at once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ...errors import CheckpointError
from ..libc import memory_at

#: Number of tensors to examine at once. The Python objects of 20,000 tensors do not fit into the CPU caches, so reading
#: one attribute of all of them, then the next, would miss the caches every time.
BATCH = 512
#: The types of almost all tensors.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own memory, unlike a subclass that wraps other tensors, such as one of 8-bit floats.

    A subclass that does not override `__torch_dispatch__`, such as nn.Buffer, has its own memory.
    """
    return type(tensor) in ORDINARY or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def plain_address(tensor: torch.Tensor) -> int | None:
    """The address of a contiguous CPU tensor whose memory holds its values; None for any other tensor."""
    contiguous = has_plain_bytes(tensor) and tensor.is_cpu and tensor.is_contiguous()
    return tensor.data_ptr() if contiguous and not (tensor.is_conj() or tensor.is_neg()) else None


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """`plain_address` of up to `BATCH` tensors; faster if none is None."""
    kind = torch.Tensor
    if (
        ORDINARY.issuperset(map(type, tensors))
        and all(map(attrgetter("is_cpu"), tensors))
        and all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_conj, tensors))
        and not any(map(kind.is_neg, tensors))
    ):
        return list(map(kind.data_ptr, tensors))
    return list(map(plain_address, tensors))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy; the view keeps the tensor alive.

    Raises:
        CheckpointError: it is another tensor, whose address no system call must get
    """
    if not (has_plain_bytes(tensor) and tensor.is_cpu and tensor.is_contiguous()):
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise CheckpointError(f"A {kind} is no contiguous memory of this process; report how it was made.")
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)
