"""Check that the chunks of a tensor cover it exactly: before a save is committed, and at a load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointCorruptError

#: Offsets of the first element, and sizes.
Region = tuple[Sequence[int], Sequence[int]]


def overlap(one: Region, other: Region) -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
    """The intersection of two regions (offsets, sizes).

    Returns:
        Its slices in the first region, its slices in the second, and its number of elements; None if it is empty.
    """
    first, second, elements = [], [], 1
    for a, size_a, b, size_b in zip(one[0], one[1], other[0], other[1], strict=True):
        start, stop = max(a, b), min(a + size_a, b + size_b)
        if start >= stop:
            return None
        first.append(slice(start - a, stop - a))
        second.append(slice(start - b, stop - b))
        elements *= stop - start
    return tuple(first), tuple(second), elements


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


def check_cover(what: str, whole: Sequence[int], regions: Sequence[Region]) -> None:
    """Refuse chunks that do not make up a whole tensor; see `cover_fault`.

    Raises:
        CheckpointCorruptError: they do not; the text says where
    """
    fault = cover_fault(what, whole, regions)
    if fault is not None:
        raise CheckpointCorruptError(fault)


def cover_fault(what: str, whole: Sequence[int], regions: Sequence[Region]) -> str | None:
    """Why chunks do not cover a tensor exactly (out of bounds, overlap, or hole); None if they do.

    Args:
        what: names the tensor at the start of the message
        whole: shape of the tensor
        regions: (offsets, sizes) of the chunks; exact ints, none negative
    """
    total = 0
    for offsets, sizes in regions:
        if len(offsets) != len(whole) or len(sizes) != len(whole):
            return f"{what} has the shape {tuple(whole)} and a chunk at {tuple(offsets)}."
        if any(start + count > limit for start, count, limit in zip(offsets, sizes, whole, strict=True)):
            return (
                f"{what}: the chunk of shape {tuple(sizes)} at {tuple(offsets)} lies outside of the tensor's shape "
                f"{tuple(whole)}."
            )
        total += math.prod(sizes)
    filled = [region for region in regions if math.prod(region[1])] if len(regions) > 1 else []
    overlapping = _first_overlap(filled, range(len(whole)))
    if overlapping is not None:
        one, other = overlapping
        return f"{what}: the chunks at {tuple(one[0])} and at {tuple(other[0])} overlap."
    elements = math.prod(whole)
    if total != elements:
        return f"{what} has a hole: its chunks hold {total} elements, and the shape {tuple(whole)} needs {elements}."
    return None


def _first_overlap(regions: Sequence[Region], dimensions: Sequence[int]) -> tuple[Region, Region] | None:
    """Find two regions that overlap. `dimensions`: those in which the regions may have different intervals."""
    if len(regions) < 2:
        return None
    if not dimensions:
        return regions[0], regions[1]
    for along in dimensions:
        groups: dict[tuple[int, int], list[Region]] = {}
        for region in regions:
            groups.setdefault((region[0][along], region[1][along]), []).append(region)
        intervals = sorted(groups)
        if all(start + count <= after for (start, count), (after, _) in itertools.pairwise(intervals)):
            # Disjoint slabs, as in any regular chunking; check each on its own.
            rest = [dimension for dimension in dimensions if dimension != along]
            overlaps = (_first_overlap(group, rest) for group in groups.values())
            return next((pair for pair in overlaps if pair is not None), None)
    return _sweep(regions, dimensions)


def _sweep(regions: Sequence[Region], dimensions: Sequence[int]) -> tuple[Region, Region] | None:
    """Find an overlap in any arrangement: sweep along one dimension and compare each region with those still open."""
    along = max(dimensions, key=lambda dimension: len({offsets[dimension] for offsets, _ in regions}))
    active: list[Region] = []
    for region in sorted(regions, key=lambda entry: entry[0][along]):
        start = region[0][along]
        active = [other for other in active if other[0][along] + other[1][along] > start]
        for other in active:
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(region[0], region[1], other[0], other[1], strict=True)
            ):
                return other, region
        active.append(region)
    return None
