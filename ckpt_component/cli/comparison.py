"""Compare what two checkpoints hold: keys, dtypes, shapes, and values, by checksum where that decides it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.progress import progress_bar
from ..exporting.blocks import TensorBlocks
from ..exporting.export import open_blocks
from ..formats import Entry, Index
from ..state.dtypes import SAFETENSORS, WIDTHS
from .key_tree import shape_text
from .object_values import same_object, value_text

#: The item of a tensor in these formats depends on nothing but the tensor, so other checksums mean other values.
_CANONICAL = ("dcp", "safetensors")
#: Dtypes with which torch computes.
_COMPUTED = {*SAFETENSORS, "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"}


@dataclass
class Norm:
    """The difference of two tensors A and B, in float64.

    Attributes:
        absolute: Euclidean norm of B - A
        relative: the same, divided by the norm of A; None: A is zero
        largest: the largest absolute difference of two elements
    """

    absolute: float
    relative: float | None
    largest: float


@dataclass
class Difference:
    """A key that is not the same in both.

    Attributes:
        key: the key
        what: `only in A`, `only in B`, `kind`, `dtype`, `shape` or `values`
        before, after: what A and B have, in words; None: nothing, or just other values
        norm: of the values, where it was asked for and there is one
    """

    key: str
    what: str
    before: str | None = None
    after: str | None = None
    norm: Norm | None = None


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        differences: in the order of A's keys, then of B's
        equal: number of keys with equal values
        by_checksum: how many of the keys of both needed no data to be read
    """

    differences: list[Difference]
    equal: int
    by_checksum: int


def compare(a: Index, b: Index, entries_a: Sequence[Entry], entries_b: Sequence[Entry], *, norm: bool) -> Comparison:
    """Compare entries of two checkpoints.

    Args:
        a: the first checkpoint
        b: the second checkpoint
        entries_a: entries of the first
        entries_b: entries of the second
        norm: compute the norm of the difference where values differ; reads them, with torch

    Raises:
        CheckpointCorruptError: data had to be read, and is damaged
    """
    others = {entry.key: entry for entry in entries_b}
    found: list[Difference] = []
    equal = by_checksum = 0
    to_read: list[tuple[Entry, Entry]] = []
    for one in entries_a:
        other = others.pop(one.key, None)
        if other is None:
            found.append(Difference(one.key, "only in A", describe(one)))
            continue
        what = _form_difference(one, other)
        if what is not None:
            found.append(Difference(one.key, what, describe(one), describe(other)))
            if norm and what == "dtype":
                to_read.append((one, other))
            continue
        same = _by_checksum(a, b, one, other)
        by_checksum += same is not None
        if same:
            equal += 1
        elif same is None or one.kind == "object" or norm:
            to_read.append((one, other))
        if same is not True:
            found.append(Difference(one.key, "values"))
    found += [Difference(other.key, "only in B", None, describe(other)) for other in others.values()]
    if to_read:
        alike = _compare_values(a, b, to_read, {difference.key: difference for difference in found}, norm)
        found = [difference for difference in found if difference.key not in alike]
        equal += len(alike)
    return Comparison(found, equal, by_checksum)


def describe(entry: Entry) -> str:
    """`float32 3072x1024`, or `object`."""
    return f"{entry.dtype} {shape_text(entry.shape)}" if entry.kind == "tensor" else "object"


def _form_difference(one: Entry, other: Entry) -> str | None:
    """In what two entries differ besides their values."""
    for what in ("kind", "shape", "dtype"):
        if getattr(one, what) != getattr(other, what):
            return what
    return None


def _by_checksum(a: Index, b: Index, one: Entry, other: Entry) -> bool | None:
    """Whether two entries are the same, by their checksums; None: these do not decide it."""
    left, right = _sums(a, one), _sums(b, other)
    if left is None or right is None or left.keys() != right.keys():
        return None
    if left == right:
        return True
    # Another release may put other bytes around a tensor, and other algorithms give other sums.
    comparable = all(left[part][1:] == right[part][1:] for part in left)
    return False if comparable and a.format == b.format and a.format in _CANONICAL else None


def _sums(index: Index, entry: Entry) -> dict[tuple[Any, ...], tuple[Any, ...]] | None:
    """What identifies the bytes of each part, by the place of the part; None: there are no checksums."""
    sums: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for piece in index.contents.ranges_at(entry.place):
        if piece.checksum is None:
            return None
        inside = None if piece.payload is None else piece.payload - piece.offset
        sums[piece.offsets, piece.shape] = (piece.checksum, piece.checksum_kind, piece.length, inside, piece.view)
    return sums


def _compare_values(
    a: Index, b: Index, pairs: Sequence[tuple[Entry, Entry]], found: dict[str, Difference], norm: bool
) -> set[str]:
    """Read values, and describe them in the differences. Returns the keys whose values are equal."""
    equal = set()
    with (
        open_blocks(a, [one for one, _ in pairs]) as left,
        open_blocks(b, [other for _, other in pairs]) as right,
        progress_bar("comparing", sum(one.nbytes + other.nbytes for one, other in pairs)) as done,
    ):
        for one, other in pairs:
            difference = found[one.key]
            same = difference.what == "values"
            if one.kind == "object":
                data = left.item(one), right.item(other)
                same = same_object(*data, one.key)
                if not same:
                    difference.before, difference.after = (value_text(each, one.key) for each in data)
            elif norm and {one.dtype, other.dtype} <= _COMPUTED:
                difference.norm = _norm(left, right, one, other)
                same = same and difference.norm is None
            elif same:
                for blocks in _aligned(left.of(one), right.of(other), 1, 1):  # to the end: the checksum follows there
                    same = same and blocks[0] == blocks[1]
            if same:
                equal.add(one.key)
            done(one.nbytes + other.nbytes)
    return equal


def _aligned(
    one: Iterator[memoryview], other: Iterator[memoryview], width: int, other_width: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """Blocks of two streams with equal numbers of elements, which have these widths."""
    left = right = memoryview(b"")
    while True:
        left = left or next(one, left)
        right = right or next(other, right)
        count = min(len(left) // width, len(right) // other_width)
        if not count:
            return
        yield left[: count * width], right[: count * other_width]
        left, right = left[count * width :], right[count * other_width :]


def _norm(left: TensorBlocks, right: TensorBlocks, one: Entry, other: Entry) -> Norm | None:
    """The norm of the difference of two tensors, block by block; None: all bytes are equal."""
    import torch

    dtypes = [getattr(torch, entry.dtype) for entry in (one, other)]
    equal, squares, of_a, largest = one.dtype == other.dtype, 0.0, 0.0, 0.0
    for blocks in _aligned(left.of(one), right.of(other), WIDTHS[one.dtype], WIDTHS[other.dtype]):
        equal = equal and blocks[0] == blocks[1]
        values = [torch.frombuffer(bytearray(block), dtype=dtype) for block, dtype in zip(blocks, dtypes, strict=True)]
        wide = torch.complex128 if any(each.is_complex() for each in values) else torch.float64
        of_one, of_other = (each.to(wide) for each in values)
        difference = (of_other - of_one).abs()
        squares += float(difference.square().sum())
        of_a += float(of_one.abs().square().sum())
        peak = float(difference.max())
        largest = peak if math.isnan(peak) else max(largest, peak)  # `max` passes over a NaN that comes second
    if equal:
        return None
    return Norm(squares**0.5, (squares / of_a) ** 0.5 if of_a else None, largest)
