"""`ckpt diff A B [PATTERN]`: what two checkpoints do not have in common.

Compare keys, dtypes, shapes and values. Where both checkpoints have the same kind of checksum and the same parts,
values are compared by checksum, and nothing is read. Exit code 1 if they differ.

example:
  ckpt diff checkpoints@100 checkpoints@200 'model.*' --norm

Where checksums cannot be compared (another format or number of ranks,
no checksums), the values are read block by block. --norm needs torch,
and also compares values of different dtypes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from ..core.commit.run_record import stored_config
from ..core.gc_control import collector_paused
from ..formats import Index, open_index
from ..formats.checkpoints import find_checkpoint, matching_keys
from .comparison import Comparison, Difference, compare
from .config_changes import config_changes
from .output import Output, fitted
from .text import Table, counted, shortened

#: Lines of differences that are shown without --all.
_SHOWN = 40
_KEY_WIDTH = 50
_SUMMARY = {
    "values": "with other values",
    "shape": "with another shape",
    "dtype": "with another dtype",
    "kind": "of another kind",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("a", metavar="A", help="a checkpoint: ROOT/iter_0000200, ROOT@200, ROOT@newest, ROOT@best")
    parser.add_argument("b", metavar="B", help="another one, of any format")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="keys: a prefix, or with * ? [] as in a shell")
    parser.add_argument("--norm", action="store_true", help="the norm of the difference, |B-A|; reads the values")
    parser.add_argument("--config", action="store_true", help="compare the configs, versions and commits instead")
    parser.add_argument("--all", action="store_true", help=f"show more than {_SHOWN} differences")


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Compare two checkpoints.

    Raises:
        CheckpointError: one of them is missing or damaged, or no key matches
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
