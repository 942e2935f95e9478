"""Regions: the parts of a tensor as offsets and sizes, one per dimension. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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
