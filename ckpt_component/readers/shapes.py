"""Dtypes, shapes and chunks that a file claims: whether they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointCorruptError
from ..state.coverage import cover_fault
from ..state.shards import Box

#: By the name after `torch.`; looked up here, because attributes of torch import modules on demand.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

#: No operator of torch takes tensors of more.
MAX_DIMENSIONS = 64
#: Above it, torch's own arithmetic of sizes and strides would overflow.
MAX_ELEMENTS = 1 << 62


def is_shape(value: Any) -> bool:
    """Whether a list or tuple from a file may be used as a shape: exact ints, none negative, no overflow."""
    if len(value) > MAX_DIMENSIONS:
        return False
    elements = 1
    for size in value:
        if type(size) is not int or size < 0:
            return False
        elements *= size or 1
    return elements < MAX_ELEMENTS


def check_cover(what: str, whole: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse chunks that do not make up a tensor; see `cover_fault`.

    Raises:
        CheckpointCorruptError: what is wrong, with the numbers.
    """
    fault = cover_fault(what, whole, boxes)
    if fault is not None:
        raise CheckpointCorruptError(fault)
