"""`ckpt show CKPT [PATTERN]`: what a checkpoint holds, and the config that it was saved with."""

from __future__ import annotations

import argparse
import io
import pickletools
import reprlib
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..core.commit.manifest import metrics_of
from ..core.commit.run_record import StoredConfig, stored_config
from ..core.gc_control import collector_paused
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointCorruptError, CheckpointError, printable
from ..exporting.export import open_blocks
from ..formats import Entry, Index, open_index
from ..formats.checkpoints import created_of, find_checkpoint, matching_keys
from ..formats.safe_unpickle import Record
from ..formats.torch_archive import DATA, load_state, members_of, stored_bytes
from .output import Output, Table, age_text, counted, shortened, width
from .verify_command import SharedFiles

_TEXT = reprlib.Repr()
_TEXT.maxstring = _TEXT.maxother = 40


def value_text(data: bytes, where: str) -> str:
    """A stored object in words: a plain value itself; of anything else, that it is an object.

    Raises:
        CheckpointCorruptError: it is no object of a checkpoint
    """
    value = load_state(_pickle(data, where), lambda reference: None)
    return "object" if isinstance(value, Record) else _TEXT.repr(value)


def same_object(one: bytes, other: bytes, where: str) -> bool:
    """Whether two stored objects are equal. Archives may differ, unless tensors are in them."""
    if one == other:
        return True
    first, second = _pickle(one, where), _pickle(other, where)
    return first == second and not any(code.name == "BINPERSID" for code, _, _ in pickletools.genops(first))


def _pickle(data: bytes, where: str) -> bytes:
    """The pickle of an object, without the archive around it."""
    stream = io.BytesIO(data)
    members = members_of(stream, len(data), where)
    name = next((each for each in members if each.rpartition("/")[2] == DATA), None)
    if name is None:
        raise CheckpointCorruptError(f"'{where}' has no {DATA}, so it is not an object of a checkpoint.")
    return stored_bytes(stream, members[name], where)


#: How many ranges of numbers a folded name shows.
_SHOWN = 3


@dataclass(frozen=True)
class Line:
    """A line of the tree.

    Attributes:
        depth: how deep it is indented
        name: its part of the key; of folded siblings all numbers, such as `0-11`
        alike: how many siblings it stands for
        dtype: dtype of the tensor, or of all tensors below; `mixed`; empty for objects
        entry: the entry, of folded siblings the first; None: it is a prefix with entries below
        tensors, objects: how many there are, in all siblings
        nbytes: bytes of all siblings
    """

    depth: int
    name: str
    alike: int
    dtype: str
    entry: Entry | None
    tensors: int
    objects: int
    nbytes: int


@dataclass
class _Node:
    entry: Entry | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0
    dtypes: frozenset[str] = frozenset()
    #: Nodes with equal contents have equal numbers.
    form: int = 0


def lines_of(entries: Iterable[Entry], depth: int | None = None) -> Iterator[Line]:
    """The lines of the tree of some entries.

    Args:
        entries: the entries
        depth: show this many levels; None: all
    """
    root = _Node()
    for entry in entries:
        node = root
        for part in _parts(entry):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
            node = child
        node.entry = entry
    _total(root, {})
    yield from _lines(root, 0, depth)


def _parts(entry: Entry) -> Iterator[str]:
    """The parts of a key: the names in the state, those with dots as of modules; a float such as 1.5 is one part."""
    for part in entry.path:
        yield from part.split(".") if isinstance(part, str) else [str(part)]


def _total(node: _Node, forms: dict[Any, int]) -> None:
    """Add up what is below a node; recursion is as deep as the longest key."""
    form: list[Any] = []
    if node.entry is not None:
        entry = node.entry
        node.tensors, node.objects = (1, 0) if entry.kind == "tensor" else (0, 1)
        node.nbytes = entry.nbytes
        node.dtypes = frozenset([entry.dtype] if entry.dtype else [])
        form.append((entry.dtype, entry.shape))
    for name, child in node.children.items():
        _total(child, forms)
        node.tensors += child.tensors
        node.objects += child.objects
        node.nbytes += child.nbytes
        node.dtypes |= child.dtypes
        form.append((name, child.form))
    node.form = forms.setdefault(tuple(form), len(forms))


def _lines(node: _Node, level: int, depth: int | None) -> Iterator[Line]:
    for name, first, group in _folded(node):
        while len(first.children) == 1 and first.entry is None:  # a chain is one line
            ((part, first),) = first.children.items()
            name += f".{part}"
        dtype = next(iter(first.dtypes), "") if len(first.dtypes) < 2 else "mixed"
        tensors, objects, nbytes = (
            sum(getattr(each, total) for each in group) for total in ("tensors", "objects", "nbytes")
        )
        yield Line(level, name, len(group), dtype, None if first.children else first.entry, tensors, objects, nbytes)
        if first.children and (depth is None or level + 1 < depth):
            yield from _lines(first, level + 1, depth)


def _folded(node: _Node) -> Iterator[tuple[str, _Node, Sequence[_Node]]]:
    """The children of a node: numbered ones of equal form together, as the first of them."""
    numbered: dict[int, list[int]] = {}
    for name, child in node.children.items():
        if name.isdecimal() and str(int(name)) == name:
            numbered.setdefault(child.form, []).append(int(name))
    for name, child in node.children.items():
        numbers = numbered.get(child.form, []) if name.isdecimal() and str(int(name)) == name else []
        if len(numbers) < 2:
            yield name, child, [child]
        elif int(name) == numbers[0]:
            yield ranges_text(sorted(numbers)), child, [node.children[str(number)] for number in numbers]


def shape_text(shape: Sequence[int]) -> str:
    """`3072x1024`; `scalar` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `0-11`, `0,2,5-7`; of many ranges the first ones."""
    ranges = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(ranges if len(ranges) <= _SHOWN else [*ranges[: _SHOWN - 1], "...", ranges[-1]])


#: Larger objects are not read, and of many only the first ones.
_READ_BYTES, _READ_OBJECTS = 16 << 10, 1000


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("checkpoint", metavar="CKPT", help="ROOT/iter_0000200, ROOT@200, ROOT@newest, ROOT@best")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="keys: a prefix, or with * ? [] as in a shell")
    parser.add_argument("--depth", type=int, metavar="N", help="show N levels of the tree")
    parser.add_argument("--flat", action="store_true", help="one line for each key, not shortened")
    parser.add_argument("--config", action="store_true", help="show the config, versions and commit of the run instead")


@collector_paused()  # there may be a hundred thousand entries
def run_show(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt show CKPT [PATTERN]`: what a checkpoint holds, and the config that it was saved with.

    Show the keys of a checkpoint as a tree, with dtypes, shapes, sizes and totals. Numbered siblings of equal contents,
    such as layers, are one line. Reads the indexes, and of data only the small objects.

    example:
      ckpt show checkpoints@200 'model.*' --depth 3
    """
    checkpoint = find_checkpoint(parsed.checkpoint, parsed.options)
    path = checkpoint.path
    if parsed.config:
        stored = stored_config(path, checkpoint.fs)
        output.result(stored, _config_lines(stored))
        return
    if parsed.depth is not None and parsed.depth < 1:
        raise CheckpointConfigError(f"--depth={parsed.depth} shows nothing; type 1 or more.")
    index = open_index(checkpoint.fs, path)
    entries = [index.entries[key] for key in matching_keys([*index.entries], parsed.pattern, path)]
    shown = [] if output.as_json or parsed.flat else [*lines_of(entries, parsed.depth)]
    values = _values(index, [line.entry for line in shown if line.alike == 1 and line.entry] or entries)
    known = _facts(index)
    data = {**known, "entries": [_as_data(index, entry, values) for entry in entries] if output.as_json else []}

    about = textwrap.wrap(_facts_line(known), width(), subsequent_indent="  ")
    output.show([output.style(path, "bold"), *about, ""])
    output.result(data, _flat_lines(entries, values) if parsed.flat else _tree_lines(shown, values, output))


def _facts(index: Index) -> dict[str, Any]:
    """What is known of a checkpoint besides its entries, as values of JSON."""
    manifest = index.manifest or {}
    kinds = {piece.checksum_kind for piece in index.ranges()} - {None}
    return {
        "path": index.path,
        "format": index.format,
        "step": index.step,
        "ranks": index.world_size,
        "nbytes": index.nbytes,
        "shared_bytes": SharedFiles(index.storage, index.folder, index.files).nbytes,
        "verified": index.verified,
        "checksum": next(iter(kinds), None),
        "created": created_of(manifest),
        "metrics": {} if index.manifest is None else metrics_of(manifest, index.path),
        "tensors": len(index.contents.tensors),
        "objects": len(index.contents.objects),
    }


def _facts_line(known: Mapping[str, Any]) -> str:
    parts = [known["format"]]
    if known["ranks"] is not None:
        parts.append(counted(known["ranks"], "rank"))
    shared = f" ({amount(known['shared_bytes'])} shared with others)" if known["shared_bytes"] else ""
    parts += [
        f"{amount(known['nbytes'])}{shared}",
        counted(known["tensors"], "tensor"),
        counted(known["objects"], "object"),
    ]
    parts.append(f"checksums {known['checksum']}" if known["checksum"] else "no checksums")
    if known["created"] is not None:
        parts.append(f"committed {age_text(time.time() - known['created'])} ago")
    parts += [f"{name} {value:g}" for name, value in known["metrics"].items()]
    return printable(", ".join(parts))


def _values(index: Index, entries: Sequence[Entry]) -> dict[str, str]:
    """Key -> value of the small objects, as text; of formats that only torch can read, none."""
    small = [entry for entry in entries if entry.kind == "object" and entry.nbytes <= _READ_BYTES][:_READ_OBJECTS]
    if index.format != "dcp" or not small:
        return {}
    values = {}
    with open_blocks(index, small) as blocks:
        for entry in small:
            try:
                values[entry.key] = value_text(blocks.item(entry), entry.key)
            except CheckpointError:
                values[entry.key] = "damaged"  # ckpt verify says more
    return values


def _as_data(index: Index, entry: Entry, values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "key": entry.key,
        "kind": entry.kind,
        "dtype": entry.dtype or None,
        "shape": list(entry.shape) if entry.kind == "tensor" else None,
        "nbytes": entry.nbytes,
        "value": values.get(entry.key),
        "files": list(dict.fromkeys(piece.file for piece in index.contents.ranges_at(entry.place))),
    }


def _flat_lines(entries: Sequence[Entry], values: Mapping[str, str]) -> Iterator[str]:
    rows = [(entry.dtype or "object", _content(entry, values), str(entry.nbytes), entry.key) for entry in entries]
    yield from Table(rows, left=(0, 1, 3)).text() if rows else ()


def _tree_lines(shown: Sequence[Line], values: Mapping[str, str], output: Output) -> Iterator[str]:
    cells = [(line.dtype or "object" * (line.entry is not None), _below(line, values), _size(line)) for line in shown]
    widths = [max((len(row[number]) for row in cells), default=0) for number in range(3)]
    room = width() - sum(widths) - 2 * len(widths)
    alike = [f"  ({line.alike} alike)" if line.alike > 1 else "" for line in shown]
    names = [shortened("  " * line.depth + line.name + more, room) for line, more in zip(shown, alike, strict=True)]
    rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
    yield from output.table(
        Table([("key", "dtype", "shape or value", "size"), *rows], left=(0, 1, 2)),
        ["" if line.entry is not None else "blue" for line in shown],
    )


def _size(line: Line) -> str:
    """The size of a line; empty for an object, whose bytes are mostly those of its form in the file."""
    return "" if line.entry is not None and line.entry.kind == "object" else amount(line.nbytes)


def _content(entry: Entry, values: Mapping[str, str]) -> str:
    return shape_text(entry.shape) if entry.kind == "tensor" else values.get(entry.key, "")


def _below(line: Line, values: Mapping[str, str]) -> str:
    if line.entry is not None:
        return _content(line.entry, values)
    counts = ((line.tensors, "tensor"), (line.objects, "object"))
    return ", ".join(counted(count, what) for count, what in counts if count)


def _config_lines(stored: StoredConfig) -> Iterator[str]:
    import yaml

    yield "# " + ", ".join(f"{name} {version}" for name, version in stored.versions.items())
    if stored.commit is not None:
        yield f"# git commit {stored.commit}"
    if stored.overrides:
        yield f"# overrides {' '.join(stored.overrides)}"
    yield from yaml.safe_dump(stored.resolved, sort_keys=False, allow_unicode=True).splitlines()
