"""Tensors whose memory is what is stored, and how many of them are examined at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

import torch

T = TypeVar("T")

#: Tensors are examined in parts of so many. The objects of 20,000 tensors are scattered over more memory than a
#: processor's caches hold, so that asking all of them one question after the other waits for memory each time.
TOGETHER = 512
#: By far most of the tensors are one of these.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def parts(values: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
    """The values in parts of `TOGETHER`, each with the number of its first."""
    return ((start, values[start : start + TOGETHER]) for start in range(0, len(values), TOGETHER))


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
    """`plain_address` of each; where none is None, that is found faster."""
    kind, found = torch.Tensor, list[int | None]()
    for _, part in parts(tensors):
        if (
            ORDINARY.issuperset(map(type, part))
            and all(map(attrgetter("is_cpu"), part))
            and all(map(kind.is_contiguous, part))
            and not any(map(kind.is_conj, part))
            and not any(map(kind.is_neg, part))
        ):
            found += map(kind.data_ptr, part)
        else:
            found += map(plain_address, part)
    return found
