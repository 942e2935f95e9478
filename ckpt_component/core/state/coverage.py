"""Check that the chunks of a tensor cover it exactly: before a save is committed, and at a load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ...errors import CheckpointCorruptError
from .boxes import Box

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
        CheckpointCorruptError: they do not; the text says where
    """
    fault = cover_fault(what, whole, boxes)
    if fault is not None:
        raise CheckpointCorruptError(fault)


def cover_fault(what: str, whole: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why chunks do not cover a tensor exactly (out of bounds, overlap, or hole); None if they do.

    Args:
        what: names the tensor at the start of the message
        whole: shape of the tensor
        boxes: (offsets, sizes) of the chunks; exact ints, none negative
    """
    total = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(whole) or len(sizes) != len(whole):
            return f"{what} has the shape {tuple(whole)} and a chunk at {tuple(offsets)}."
        if any(start + count > limit for start, count, limit in zip(offsets, sizes, whole, strict=True)):
            return (
                f"{what}: the chunk of shape {tuple(sizes)} at {tuple(offsets)} lies outside of the tensor's shape "
                f"{tuple(whole)}."
            )
        total += math.prod(sizes)
    filled = [box for box in boxes if math.prod(box[1])] if len(boxes) > 1 else []
    overlapping = _first_overlap(filled, range(len(whole)))
    if overlapping is not None:
        one, other = overlapping
        return f"{what}: the chunks at {tuple(one[0])} and at {tuple(other[0])} overlap."
    elements = math.prod(whole)
    if total != elements:
        return f"{what} has a hole: its chunks hold {total} elements, and the shape {tuple(whole)} needs {elements}."
    return None


def _first_overlap(boxes: Sequence[Box], dimensions: Sequence[int]) -> tuple[Box, Box] | None:
    """Find two boxes that overlap. `dimensions`: those in which the boxes may have different intervals."""
    if len(boxes) < 2:
        return None
    if not dimensions:
        return boxes[0], boxes[1]
    for along in dimensions:
        groups: dict[tuple[int, int], list[Box]] = {}
        for box in boxes:
            groups.setdefault((box[0][along], box[1][along]), []).append(box)
        intervals = sorted(groups)
        if all(start + count <= after for (start, count), (after, _) in itertools.pairwise(intervals)):
            # Disjoint slabs, as in any regular chunking; check each on its own.
            rest = [dimension for dimension in dimensions if dimension != along]
            overlaps = (_first_overlap(group, rest) for group in groups.values())
            return next((pair for pair in overlaps if pair is not None), None)
    return _sweep(boxes, dimensions)


def _sweep(boxes: Sequence[Box], dimensions: Sequence[int]) -> tuple[Box, Box] | None:
    """Find an overlap in any arrangement: sweep along one dimension and compare each box with those still open."""
    along = max(dimensions, key=lambda dimension: len({offsets[dimension] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda entry: entry[0][along]):
        start = box[0][along]
        active = [other for other in active if other[0][along] + other[1][along] > start]
        for other in active:
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(box[0], box[1], other[0], other[1], strict=True)
            ):
                return other, box
        active.append(box)
    return None
