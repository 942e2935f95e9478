"""Tensors whose memory is what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after the other in the host's memory, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def are_plain(tensors: Sequence[torch.Tensor]) -> Sequence[bool]:
    """`is_plain` of each; where all are, that is found faster."""
    kind = torch.Tensor
    if (
        all(map(attrgetter("is_cpu"), tensors))
        and all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_conj, tensors))
        and not any(map(kind.is_neg, tensors))
    ):
        return [True] * len(tensors)
    return list(map(is_plain, tensors))
