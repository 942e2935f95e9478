"""Dtypes, shapes and chunks that a file claims: whether they can be, and whether the chunks make up the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointCorruptError
from ..image.shards import Box

#: By the name after `torch.`; looked up here, because attributes of torch import modules on demand.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

#: No operator of torch takes tensors of more.
MOST_DIMENSIONS = 64
#: Above it, torch's own arithmetic of sizes and strides would overflow.
MOST_ELEMENTS = 1 << 62


def is_shape(value: Any) -> bool:
    """Whether a list or tuple from a file may be used as a shape: exact ints, none negative, no overflow."""
    if len(value) > MOST_DIMENSIONS:
        return False
    elements = 1
    for size in value:
        if type(size) is not int or size < 0:
            return False
        elements *= size or 1
    return elements < MOST_ELEMENTS


def check_cover(what: str, whole: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse chunks that do not make up a tensor exactly: out of bounds, overlapping, or with a hole.

    Args:
        what: of error texts: key and file.
        whole: shape of the tensor.
        boxes: (offsets, sizes) of the chunks; exact ints, none negative.

    Raises:
        CheckpointCorruptError: what is wrong, with the numbers.
    """
    total = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(whole) or len(sizes) != len(whole):
            raise CheckpointCorruptError(f"{what} has the shape {tuple(whole)} and a chunk at {tuple(offsets)}.")
        if any(start + count > limit for start, count, limit in zip(offsets, sizes, whole, strict=True)):
            raise CheckpointCorruptError(
                f"{what}: the chunk of shape {tuple(sizes)} at {tuple(offsets)} lies outside of the tensor's shape "
                f"{tuple(whole)}."
            )
        total += math.prod(sizes)
    filled = [box for box in boxes if math.prod(box[1])] if len(boxes) > 1 else []
    found = _first_overlap(filled, range(len(whole)))
    if found is not None:
        one, other = found
        raise CheckpointCorruptError(f"{what}: the chunks at {tuple(one[0])} and at {tuple(other[0])} overlap.")
    elements = math.prod(whole)
    if total != elements:
        raise CheckpointCorruptError(
            f"{what} has a hole: its chunks hold {total} elements, and the shape {tuple(whole)} needs {elements}."
        )


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
            found = (_first_overlap(group, rest) for group in groups.values())
            return next((pair for pair in found if pair is not None), None)
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
