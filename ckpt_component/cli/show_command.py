"""`ckpt show CKPT [PATTERN]`: what a checkpoint holds, and the config that it was saved with.

Show the keys of a checkpoint as a tree, with dtypes, shapes, sizes and totals. Numbered siblings of equal contents,
such as layers, are one line. Reads the indexes, and of data only the small objects.

example:
  ckpt show checkpoints@200 'model.*' --depth 3
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.commit.manifest import metrics_of
from ..core.commit.run_record import StoredConfig, stored_config
from ..core.gc_control import collector_paused
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointError, printable
from ..exporting.export import open_blocks
from ..formats import Entry, Index, open_index
from ..formats.checkpoints import created_of, find_checkpoint, matching_keys
from .key_tree import Line, lines_of, shape_text
from .object_values import value_text
from .output import Output, width
from .shared_files import SharedFiles
from .text import Table, age_text, counted, shortened

#: Larger objects are not read, and of many only the first ones.
_READ_BYTES, _READ_OBJECTS = 16 << 10, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("checkpoint", metavar="CKPT", help="ROOT/iter_0000200, ROOT@200, ROOT@newest, ROOT@best")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="keys: a prefix, or with * ? [] as in a shell")
    parser.add_argument("--depth", type=int, metavar="N", help="show N levels of the tree")
    parser.add_argument("--flat", action="store_true", help="one line for each key, not shortened")
    parser.add_argument("--config", action="store_true", help="show the config, versions and commit of the run instead")


@collector_paused()  # there may be a hundred thousand entries
def run(parsed: argparse.Namespace, output: Output) -> None:
    """Show a checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or no key matches
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
