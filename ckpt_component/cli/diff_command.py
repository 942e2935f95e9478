"""`ckpt diff A B [PATTERN]`: what two checkpoints do not have in common."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.commit.run_record import StoredConfig, stored_config
from ..core.gc_control import collector_paused
from ..core.progress import progress_bar
from ..exporting.blocks import TensorBlocks
from ..exporting.export import open_blocks
from ..formats import Entry, Index, open_index
from ..formats.checkpoints import find_checkpoint, matching_keys
from ..state.dtypes import SAFETENSORS, WIDTHS
from .output import Output, Table, counted, fitted, shortened
from .show_command import same_object, shape_text, value_text

#: Stands for a key that is not there.
MISSING = "unset"


@dataclass(frozen=True)
class Change:
    """A key with its value before and after, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def config_changes(before: StoredConfig, after: StoredConfig) -> list[Change]:
    """The keys whose resolved values differ; `versions.torch` and `commit` are such keys too."""
    old, new = dict(_values(before)), dict(_values(after))
    keys = [*old, *(key for key in new if key not in old)]
    pairs = [(key, old.get(key, MISSING), new.get(key, MISSING)) for key in keys]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _values(stored: StoredConfig) -> Iterator[tuple[str, str]]:
    yield from _leaves("", stored.resolved)
    yield from _leaves("versions.", stored.versions)
    if stored.commit is not None:
        yield "commit", stored.commit[:12]


def _leaves(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


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


#: Lines of differences that are shown without --all.
_SHOWN = 40
_KEY_WIDTH = 50
_SUMMARY = {
    "values": "with other values",
    "shape": "with another shape",
    "dtype": "with another dtype",
    "kind": "of another kind",
}


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("a", metavar="A", help="a checkpoint: ROOT/iter_0000200, ROOT@200, ROOT@newest, ROOT@best")
    parser.add_argument("b", metavar="B", help="another one, of any format")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="keys: a prefix, or with * ? [] as in a shell")
    parser.add_argument("--norm", action="store_true", help="the norm of the difference, |B-A|; reads the values")
    parser.add_argument("--config", action="store_true", help="compare the configs, versions and commits instead")
    parser.add_argument("--all", action="store_true", help=f"show more than {_SHOWN} differences")


def run_diff(parsed: argparse.Namespace, output: Output) -> int:
    """`ckpt diff A B [PATTERN]`: what two checkpoints do not have in common.

    Compare keys, dtypes, shapes and values. Where both checkpoints have the same kind of checksum and the same parts,
    values are compared by checksum, and nothing is read. Exit code 1 if they differ.

    example:
      ckpt diff checkpoints@100 checkpoints@200 'model.*' --norm

    Where checksums cannot be compared (another format or number of ranks,
    no checksums), the values are read block by block. --norm needs torch,
    and also compares values of different dtypes.
    """
    a, b = (find_checkpoint(each, parsed.options) for each in (parsed.a, parsed.b))
    if parsed.config:
        changes = config_changes(*(stored_config(each.path, each.fs) for each in (a, b)))
        data = {"a": a.path, "b": b.path, "changes": changes}
        output.result(data, map(str, changes) if changes else ["the configs are equal"])
        return int(bool(changes))
    return _compare(open_index(a.fs, a.path), open_index(b.fs, b.path), parsed, output)


@collector_paused()  # there may be a hundred thousand entries
def _compare(a: Index, b: Index, parsed: argparse.Namespace, output: Output) -> int:
    keys = [*a.entries, *(key for key in b.entries if key not in a.entries)]
    chosen = set(matching_keys(keys, parsed.pattern, f"{a.path} or {b.path}"))
    entries = [[entry for key, entry in each.entries.items() if key in chosen] for each in (a, b)]
    result = compare(a, b, *entries, norm=parsed.norm)
    data = {"a": a.path, "b": b.path, **vars(result)}
    output.result(data, _lines(a, b, result, parsed, output))
    return int(bool(result.differences))


def _lines(a: Index, b: Index, result: Comparison, parsed: argparse.Namespace, output: Output) -> Iterator[str]:
    for name, index in (("A", a), ("B", b)):
        yield f"{name}  {index.path}  ({index.format})"
    yield ""
    shown = result.differences if parsed.all else result.differences[:_SHOWN]
    if shown:
        header = ("key", "what", *(("|B-A|", "|B-A|/|A|", "largest") if parsed.norm else ()), "A -> B")
        rows = [
            (
                shortened(difference.key, _KEY_WIDTH),
                difference.what,
                *(_norm_cells(difference) if parsed.norm else ()),
                _change(difference),
            )
            for difference in shown
        ]
        yield from output.table(Table([header, *rows], left=range(len(header))))
        if len(shown) < len(result.differences):
            yield f"... and {len(result.differences) - len(shown)} more; --all shows them"
        yield ""
    yield _summary(result)


def _norm_cells(difference: Difference) -> tuple[str, str, str]:
    norm = difference.norm
    if norm is None:
        return "", "", ""
    return f"{norm.absolute:.4g}", "" if norm.relative is None else f"{norm.relative:.3g}", f"{norm.largest:.4g}"


def _change(difference: Difference) -> str:
    return " -> ".join(text for text in (difference.before, difference.after) if text is not None)


def _summary(result: Comparison) -> str:
    """`290 keys with other values, 2 only in A; 4 keys equal; 294 compared by checksum`."""
    counts = Counter(difference.what for difference in result.differences)
    different = [f"{counted(count, 'key')} {_SUMMARY.get(what, what)}" for what, count in counts.items()]
    parts = [", ".join(different) or "no difference", f"{counted(result.equal, 'key')} equal"]
    return fitted("; ".join([*parts, f"{result.by_checksum} compared by checksum"]))
