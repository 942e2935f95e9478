"""Integrity tables: what each rank wrote, item by item. Checked as data before anything is allocated by them."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError
from ..image.tree import Path
from ..storage.fs import FsOps
from ..storage.regular import read_failure
from .shapes import DTYPES, MOST_DIMENSIONS, MOST_ELEMENTS, is_shape

_MAX_TABLE_BYTES = 1 << 30
_PATH_PARTS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = ("list", "odict", "empty")


class StoredItem(NamedTuple):  # there may be a hundred thousand, and a dataclass takes longer to make
    """One item: where it is, where its payload of `nbytes` starts in the file, and its checksum.

    `dtype` is None for an object.
    """

    file: str
    offset: int
    length: int
    payload: int
    nbytes: int
    checksum: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class StoredKey(NamedTuple):
    """One tensor: its place in the state, its item's number, and which part of a whole it is (None: the whole)."""

    path: Path
    item: int
    part: tuple[tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True)
class RankTable:
    """What one rank wrote.

    Attributes:
        checksum: the algorithm of the items' checksums.
        items: of tensors, then of objects.
        keys: the tensors; none in a format that has its own index.
        objects: places of objects, with the number of each one's item.
        containers: as `FlatState.containers`.
    """

    checksum: str
    items: list[StoredItem]
    keys: list[StoredKey]
    objects: list[tuple[Path, int]]
    containers: list[tuple[Path, str]]


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
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
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
    tensors, extras = layout["items"], content["extras"]
    if not isinstance(algorithm, str) or len(sums) != len(tensors) + len(extras):
        raise ValueError(f"it has {len(sums)} checksums of {algorithm!r:.200} for {len(tensors) + len(extras)} items")
    _check_ints(sums)
    # The first sums are those of the tensors.
    items = _tensors(tensors, sums[: len(tensors)], names, sizes)
    for (name, offset, length), checksum in zip(extras, sums[len(tensors) :], strict=True):
        if name not in sizes:
            raise ValueError(f"it refers to the file {name!r:.200}, which the manifest does not list")
        _check_place(name, offset, length, sizes)
        items.append(StoredItem(name, offset, length, offset, length, checksum, None, ()))
    keys = _keys(layout.get("keys", ()), items, len(tensors))
    objects = [(_place_of(raw), _number(item, len(tensors), len(items))) for raw, item in layout.get("objects", ())]
    containers = [(_path(raw), kind) for raw, kind in layout.get("containers", ())]
    if any(kind not in _CONTAINERS for _, kind in containers):
        raise ValueError("it has a container of an unknown kind")
    return RankTable(algorithm, items, keys, objects, containers)


def _tensors(
    rows: Sequence[Any], sums: Sequence[int], names: Sequence[str], sizes: Mapping[str, int]
) -> list[StoredItem]:
    """The items of tensors, looked at column by column: one by one, many small ones take longer than their bytes."""
    if not rows:
        return []
    files, offsets, lengths, payloads, kinds, shapes = zip(*rows, strict=True)
    dtypes = {kind: _dtype(kind) for kind in set(kinds)}
    forms = list(map(tuple, shapes))
    elements = _elements(forms)
    itemsizes = {kind: dtype.itemsize for kind, dtype in dtypes.items()}
    file, offset, length, payload = map(_column, (files, offsets, lengths, payloads))
    itemsize = torch.tensor([itemsizes[kind] for kind in kinds])
    # Their product could overflow.
    _refuse(
        elements > length // itemsize, "{} elements do not fit the item at {} of {} bytes", elements, offset, length
    )
    needed = elements * itemsize
    _refuse(file < 0, "it has an item in the file number {}", file)  # an index that is negative counts from the end
    _refuse(file >= len(names), "it has an item in the file number {}", file)
    size = torch.tensor([sizes[name] for name in names])[file]
    _refuse((offset < 0) | (length < 0), "it has an item at {} of {} bytes", offset, length)
    # The sums below cannot overflow, because a file has fewer than 2^63 bytes.
    _refuse(
        (offset > size) | (length > size - offset),
        "its item at {} of {} bytes ends behind its file of {} bytes",
        *(offset, length, size),
    )
    _refuse(
        (payload < offset) | (payload - offset > length - needed),
        "{} bytes at {} do not fit the item at {} of {} bytes",
        *(needed, payload, offset, length),
    )
    columns = ([names[number] for number in files], offsets, lengths, payloads, needed.tolist(), sums)
    return list(map(StoredItem, *columns, [dtypes[kind] for kind in kinds], forms))


def _elements(shapes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """How many elements tensors of these shapes have, each a shape that can be."""
    ranks, sizes = list(map(len, shapes)), list(chain.from_iterable(shapes))
    exact = set(map(type, sizes)) <= {int}
    # A size of 0 hides what the others come to.
    if not exact or min(sizes, default=1) < 1 or max(ranks) > MOST_DIMENSIONS:
        for shape in shapes:
            if not is_shape(shape):
                raise ValueError(f"it has an item of the shape {list(shape)!r:.200}")
    counts = list(map(math.prod, shapes))
    if max(counts) >= MOST_ELEMENTS:
        raise ValueError(f"it has an item of the shape {list(shapes[counts.index(max(counts))])!r:.200}")
    return torch.tensor(counts)


def _column(values: Sequence[Any]) -> torch.Tensor:
    """Exact ints of 64 bits."""
    _check_ints(values)
    return torch.tensor(values, dtype=torch.int64)


def _check_ints(values: Sequence[Any]) -> None:
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise ValueError(f"it has {wrong!r:.200} where a whole number is expected")


def _refuse(wrong: torch.Tensor, text: str, *columns: torch.Tensor) -> None:
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(text.format(*(int(column[first]) for column in columns)))


def _check_place(name: str, offset: Any, length: Any, sizes: Mapping[str, int]) -> None:
    if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
        raise ValueError(f"it has an item at {offset!r:.200} of {length!r:.200} bytes in {name}")
    if offset + length > sizes[name]:
        raise ValueError(f"its item at {offset} of {length} bytes ends behind {name}, which has {sizes[name]} bytes")


def _keys(rows: Sequence[Any], items: Sequence[StoredItem], tensors: int) -> list[StoredKey]:
    if set(map(len, rows)) != {2}:
        return [_key(entry, items, tensors) for entry in rows]
    # All of them whole tensors: looked at column by column, as above.
    raws, numbers = zip(*rows, strict=True)
    number = _column(numbers)
    _refuse((number < 0) | (number >= tensors), "it refers to the item {}, which is no tensor's", number)
    if set(map(type, raws)) != {list} or not all(raws) or not _PATH_PARTS.issuperset(map(type, chain(*raws))):
        for raw in raws:
            _place_of(raw)
    return list(map(StoredKey, map(tuple, raws), numbers, repeat(None)))


def _key(entry: Sequence[Any], items: Sequence[StoredItem], tensors: int) -> StoredKey:
    raw, number, *part = entry
    item = items[_number(number, 0, tensors)]
    if not part:
        return StoredKey(_place_of(raw), number, None)
    whole, offsets = part
    if not (isinstance(whole, list) and isinstance(offsets, list) and is_shape(whole) and is_shape(offsets)):
        raise ValueError(f"it has the part at {offsets!r:.200} of {whole!r:.200}")
    if not len(whole) == len(offsets) == len(item.shape):
        raise ValueError(f"it has a part of shape {item.shape} at {offsets!r:.200} of {whole!r:.200}")
    return StoredKey(_place_of(raw), number, (tuple(whole), tuple(offsets)))


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


def _dtype(name: Any) -> torch.dtype:
    found = DTYPES.get(name)
    if found is None:
        raise ValueError(f"it names the dtype {name!r:.200}, which this torch does not have")
    return found
