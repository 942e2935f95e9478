"""Whether the chunks of a tensor make up the whole: asked before a save is committed, and when it is loaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .shards import Box


def cover_fault(what: str, whole: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why chunks do not make up a tensor exactly: out of bounds, overlapping, or with a hole. None where they do.

    Args:
        what: is made up; the text begins with it.
        whole: shape of the tensor.
        boxes: (offsets, sizes) of the chunks; exact ints, none negative.
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
    """Two boxes that have an element in common. `dimensions`: those in which the boxes are not known to be alike."""
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
            # Slabs side by side, as in any table of chunks; each is looked at alone.
            rest = [dimension for dimension in dimensions if dimension != along]
            overlaps = (_first_overlap(group, rest) for group in groups.values())
            return next((pair for pair in overlaps if pair is not None), None)
    return _sweep(boxes, dimensions)


def _sweep(boxes: Sequence[Box], dimensions: Sequence[int]) -> tuple[Box, Box] | None:
    """Any arrangement: along one dimension, each box is compared with those that reach into its place."""
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
