"""Integrity tables: what each rank wrote, item by item. Checked as data before anything is allocated by them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ..errors import CheckpointCorruptError
from ..state.flatten import Path
from ..storage.fs import FsOps
from ..storage.safe_open import read_failure
from .items import StoredItem, TensorItems, check_ints, column, refuse, tensor_items
from .shapes import is_shape

_MAX_TABLE_BYTES = 1 << 30
_PATH_PARTS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = ("list", "odict", "empty")

#: A part of a whole tensor: the whole's shape, and where the part begins in it.
Part = tuple[tuple[int, ...], tuple[int, ...]]


class StoredKeys(NamedTuple):
    """The tensors of one rank: places in the state, numbers of their items, and which parts of wholes they are.

    `parts` is None where all are whole tensors, by far the most common case, and otherwise has None for those that are.
    """

    paths: Sequence[Path]
    items: Sequence[int]
    parts: Sequence[Part | None] | None


@dataclass(frozen=True)
class RankTable:
    """What one rank wrote.

    Attributes:
        checksum: the algorithm of the items' checksums.
        tensors: the items of tensors.
        extras: the items of objects, whose numbers go on from those of the tensors.
        keys: the tensors; none in a format that has its own index.
        objects: places of objects, with each one's item.
        containers: as `FlatState.containers`.
    """

    checksum: str
    tensors: TensorItems
    extras: list[StoredItem]
    keys: StoredKeys
    objects: list[tuple[Path, StoredItem]]
    containers: list[tuple[Path, str]]

    def items_in(self, name: str) -> list[StoredItem]:
        """All items of one file."""
        every = [*map(self.tensors.item, range(len(self.tensors))), *self.extras]
        return [item for item in every if item.file == name]


def read_tables(
    fs: FsOps, folder: str, manifest: Mapping[str, Any], ranks: Sequence[int] | None = None
) -> list[RankTable]:
    """The tables of some ranks, each verified against the manifest.

    Args:
        fs: where effects go.
        folder: the checkpoint.
        manifest: of `read_manifest`.
        ranks: whose; None: all of the manifest's.

    Raises:
        CheckpointCorruptError: one is missing, damaged, or makes no sense.
        CheckpointUnreadableError: one cannot be read.
    """
    entries = {entry["name"]: entry for entry in manifest["files"]}
    sizes = {name: entry["size"] for name, entry in entries.items()}
    tables = []
    for rank in range(manifest["world_size"]) if ranks is None else ranks:
        name = f"integrity-{rank}.json"
        path = os.path.join(folder, name)
        if "crc32" not in entries.get(name, {}):
            raise CheckpointCorruptError(f"manifest.json in {folder} does not list {name} with its checksum.")
        try:
            data = fs.read(path, _MAX_TABLE_BYTES)
        except OSError as error:
            raise read_failure(path, error) from error
        if zlib.crc32(data) != entries[name]["crc32"]:
            raise CheckpointCorruptError(
                f"{path} does not match its checksum in manifest.json; one of the two is damaged."
            )
        try:
            tables.append(_parse(json.loads(data), sizes))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointCorruptError(f"{path} makes no sense: {type(error).__name__}: {error}.") from error
    return tables


def _parse(content: Any, sizes: Mapping[str, int]) -> RankTable:
    layout = content["layout"]
    names = layout["files"]
    for name in names:
        if name not in sizes:
            raise ValueError(f"it refers to the file {name!r:.200}, which the manifest does not list")
    # Before the algorithm could be chosen, the sums stood under their only name.
    algorithm, sums = (content["checksum"], content["sums"]) if "sums" in content else ("crc32", content["crc32"])
    rows, rest = layout["items"], content["extras"]
    if not isinstance(algorithm, str) or len(sums) != len(rows) + len(rest):
        raise ValueError(f"it has {len(sums)} checksums of {algorithm!r:.200} for {len(rows) + len(rest)} items")
    check_ints(sums)
    # The first sums are those of the tensors.
    count = len(rows)
    tensors = tensor_items(rows, sums[:count], names, sizes)
    extras = [_extra(row, checksum, sizes) for row, checksum in zip(rest, sums[count:], strict=True)]
    keys = _keys(layout.get("keys", ()), tensors)
    objects = [
        (_place_of(raw), extras[_number(item, count, count + len(extras)) - count])
        for raw, item in layout.get("objects", ())
    ]
    containers = [(_path(raw), kind) for raw, kind in layout.get("containers", ())]
    if any(kind not in _CONTAINERS for _, kind in containers):
        raise ValueError("it has a container of an unknown kind")
    return RankTable(algorithm, tensors, extras, keys, objects, containers)


def _extra(row: Sequence[Any], checksum: int, sizes: Mapping[str, int]) -> StoredItem:
    """The item of an object."""
    name, offset, length = row
    if name not in sizes:
        raise ValueError(f"it refers to the file {name!r:.200}, which the manifest does not list")
    if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
        raise ValueError(f"it has an item at {offset!r:.200} of {length!r:.200} bytes in {name}")
    if offset + length > sizes[name]:
        raise ValueError(f"its item at {offset} of {length} bytes ends behind {name}, which has {sizes[name]} bytes")
    return StoredItem(name, offset, length, offset, length, checksum, None, ())


def _keys(rows: Sequence[Any], tensors: TensorItems) -> StoredKeys:
    if set(map(len, rows)) == {2}:
        # All of them whole tensors: looked at column by column, as the items are.
        raws, numbers = zip(*rows, strict=True)
        number = column(numbers)
        refuse((number < 0) | (number >= len(tensors)), "it refers to the item {}, which is no tensor's", number)
        if set(map(type, raws)) != {list} or not all(raws) or not _PATH_PARTS.issuperset(map(type, chain(*raws))):
            for raw in raws:
                _place_of(raw)
        return StoredKeys(list(map(tuple, raws)), numbers, None)
    paths, items, parts = [], [], []
    for raw, number, *part in rows:
        items.append(_number(number, 0, len(tensors)))
        paths.append(_place_of(raw))
        parts.append(_part(part, tensors.shapes[number]) if part else None)
    return StoredKeys(paths, items, parts)


def _part(raw: Sequence[Any], shape: tuple[int, ...]) -> Part:
    whole, offsets = raw
    if not (isinstance(whole, list) and isinstance(offsets, list) and is_shape(whole) and is_shape(offsets)):
        raise ValueError(f"it has the part at {offsets!r:.200} of {whole!r:.200}")
    if not len(whole) == len(offsets) == len(shape):
        raise ValueError(f"it has a part of shape {shape} at {offsets!r:.200} of {whole!r:.200}")
    return tuple(whole), tuple(offsets)


def _place_of(raw: Any) -> Path:
    """The path of a value: the state itself is none."""
    if not raw:
        raise ValueError("it has a value without a key")
    return _path(raw)


def _path(raw: Any) -> Path:
    if not isinstance(raw, list) or not _PATH_PARTS.issuperset(map(type, raw)):
        raise ValueError(f"it has the key {raw!r:.200}")
    return tuple(raw)


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"it refers to the item {value!r:.200}, which is not one of {low} to {high - 1}")
    return value
