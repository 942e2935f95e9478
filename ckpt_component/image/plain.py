"""Tensors whose memory is what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from .parts import parts


def plain_address(tensor: torch.Tensor) -> int | None:
    """Where a tensor's memory begins, if its elements lie there one after the other, as they are, on the host."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.data_ptr()
    return None


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """`plain_address` of each; where none is None, that is found faster."""
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
            found += map(plain_address, part)
    return found
