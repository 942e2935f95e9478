"""Tensors whose memory is what is stored, and how many of them are examined at once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

#: So many tensors are examined together. The objects of 20,000 tensors are scattered over more memory than a
#: processor's caches hold, so that asking all of them one question after the other waits for memory each time.
TOGETHER = 512
#: By far most of the tensors are one of these.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def is_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own: no subclass that stands for other tensors, such as one of 8-bit floats.

    A subclass that adds no behaviour of its own to operators, such as nn.Buffer, is just its bytes.
    """
    return type(tensor) in ORDINARY or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def plain_address(tensor: torch.Tensor) -> int | None:
    """Where a tensor's memory begins, if its elements lie there one after the other, as they are, on the host."""
    there = is_its_bytes(tensor) and tensor.is_cpu and tensor.is_contiguous()
    return tensor.data_ptr() if there and not (tensor.is_conj() or tensor.is_neg()) else None


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """`plain_address` of each of at most `TOGETHER`, which is found faster where none is None."""
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
