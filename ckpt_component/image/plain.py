"""Tensors whose memory is what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from .parts import parts


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after the other in the host's memory, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Where the memory of each tensor begins; None for one that is not plain. Where all are, that is found faster."""
    kind, found = torch.Tensor, list[int | None]()
    for _, part in parts(tensors):
        if (
            all(map(attrgetter("is_cpu"), part))
            and all(map(kind.is_contiguous, part))
            and not any(map(kind.is_conj, part))
            and not any(map(kind.is_neg, part))
        ):
            found += map(kind.data_ptr, part)
        else:
            found += (tensor.data_ptr() if is_plain(tensor) else None for tensor in part)
    return found
