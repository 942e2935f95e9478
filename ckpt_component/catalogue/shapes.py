"""Validate shapes and chunks that come from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointCorruptError
from ..state.boxes import Box
from ..state.coverage import cover_fault

#: The most that operators of torch accept.
MAX_DIMENSIONS = 64
#: Above this, torch's own arithmetic of sizes and strides overflows.
MAX_ELEMENTS = 1 << 62


def is_shape(value: Any) -> bool:
    """Whether a list or tuple from a file is a valid shape: ints, none negative, no overflow."""
    if len(value) > MAX_DIMENSIONS:
        return False
    elements = 1
    for size in value:
        if type(size) is not int or size < 0:
            return False
        elements *= size or 1
    return elements < MAX_ELEMENTS


def check_cover(what: str, whole: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse chunks that do not make up a whole tensor; see `cover_fault`.

    Raises:
        CheckpointCorruptError: They do not; the text says where.
    """
    fault = cover_fault(what, whole, boxes)
    if fault is not None:
        raise CheckpointCorruptError(fault)
