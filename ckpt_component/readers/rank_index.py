"""The index of a rank: what it wrote, item by item. Checked as data before anything is allocated by it.

Column by column: one by one, many small items take longer than their bytes.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError
from ..memory.int_columns import column_of
from ..state.flatten import Path
from ..storage.fs import FsOps
from ..storage.safe_open import read_failure
from .shapes import DTYPES, MAX_DIMENSIONS, MAX_ELEMENTS, is_shape

_MAX_INDEX_BYTES = 1 << 30
_PATH_PARTS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = frozenset({"list", "odict", "empty"})

#: A part of a whole tensor: the whole's shape, and where the part begins in it.
Part = tuple[tuple[int, ...], tuple[int, ...]]


class StoredItem(NamedTuple):
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


@dataclass(frozen=True)
class TensorItems:
    """The items of tensors of one rank. All columns have one element for each item; those of numbers are int64.

    Attributes:
        names: files, by number.
        file: number of the file.
        offset: where the item begins in its file.
        length: bytes of the item.
        payload: where the tensor's bytes begin in the file.
        nbytes: how many they are.
        checksums: of the items; up to 64 bits without a sign.
        dtypes, shapes: of the tensors.
    """

    names: Sequence[str]
    file: torch.Tensor
    offset: torch.Tensor
    length: torch.Tensor
    payload: torch.Tensor
    nbytes: torch.Tensor
    checksums: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]

    def item(self, number: int) -> StoredItem:
        """One of them."""
        columns = (self.file, self.offset, self.length, self.payload, self.nbytes)
        file, offset, length, payload, nbytes = (int(column[number]) for column in columns)
        known = self.checksums[number], self.dtypes[number], self.shapes[number]
        return StoredItem(self.names[file], offset, length, payload, nbytes, *known)


class StoredKeys(NamedTuple):
    """The tensors of one rank: places in the state, numbers of their items, and which parts of wholes they are.

    `parts` is None where all are whole tensors, by far the most common case, and otherwise has None for those that are.
    """

    paths: Sequence[Path]
    items: Sequence[int]
    parts: Sequence[Part | None] | None


@dataclass(frozen=True)
class RankIndex:
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


def read_rank_indexes(
    fs: FsOps, folder: str, manifest: Mapping[str, Any], ranks: Sequence[int] | None = None
) -> list[RankIndex]:
    """The indexes of some ranks, each verified against the manifest.

    Args:
        fs: the file system.
        folder: the checkpoint.
        manifest: of `read_manifest`.
        ranks: whose; None: all of the manifest's.

    Raises:
        CheckpointCorruptError: one is missing, damaged, or invalid.
        CheckpointUnreadableError: one cannot be read.
    """
    entries = {entry["name"]: entry for entry in manifest["files"]}
    indexes = []
    for rank in range(manifest["world_size"]) if ranks is None else ranks:
        name = f"integrity-{rank}.json"
        path = os.path.join(folder, name)
        if "crc32" not in entries.get(name, {}):
            raise CheckpointCorruptError(f"manifest.json in {folder} does not list {name} with its checksum.")
        try:
            data = fs.read(path, _MAX_INDEX_BYTES)
        except OSError as error:
            raise read_failure(path, error) from error
        if zlib.crc32(data) != entries[name]["crc32"]:
            raise CheckpointCorruptError(
                f"{path} does not match its checksum in manifest.json; one of the two is damaged."
            )
        try:
            indexes.append(_parse(json.loads(data), entries))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointCorruptError(f"{path} is invalid: {type(error).__name__}: {error}.") from error
    return indexes


def _parse(content: Any, entries: Mapping[str, Any]) -> RankIndex:
    layout, rest = content["layout"], content["extras"]
    rows, names = layout["items"], layout["files"]
    for name in chain(names, (row[0] for row in rest)):
        if name not in entries:
            raise ValueError(f"it refers to the file {name!r:.200}, which the manifest does not list")
    # Before the algorithm could be chosen, the checksums stood under their only name.
    algorithm, sums = (content["checksum"], content["sums"]) if "sums" in content else ("crc32", content["crc32"])
    if not isinstance(algorithm, str) or len(sums) != len(rows) + len(rest):
        raise ValueError(f"it has {len(sums)} checksums of {algorithm!r:.200} for {len(rows) + len(rest)} items")
    _check_ints(sums)
    count = len(rows)  # the first checksums are those of the tensors
    tensors = tensor_items(rows, sums[:count], names, [entries[name]["size"] for name in names])
    extras = []
    for (name, offset, length), checksum in zip(rest, sums[count:], strict=True):
        _check_ints((offset, length))
        if min(offset, length) < 0 or offset + length > entries[name]["size"]:
            raise ValueError(f"it has an item at {offset} of {length} bytes in {name}")
        extras.append(StoredItem(name, offset, length, offset, length, checksum, None, ()))
    objects = []
    for raw, number in layout.get("objects", ()):
        if type(number) is not int or not count <= number < len(sums):
            raise ValueError(f"it refers to the item {number!r:.200}, which is no object's")
        objects.append((_path(raw), extras[number - count]))
    containers = []
    for raw, kind in layout.get("containers", ()):
        if kind not in _CONTAINERS:
            raise ValueError(f"it has a container of the unknown kind {kind!r:.200}")
        containers.append((_path(raw) if raw else (), kind))
    return RankIndex(algorithm, tensors, extras, _keys(layout.get("keys", ()), tensors), objects, containers)


def _keys(rows: Sequence[Sequence[Any]], tensors: TensorItems) -> StoredKeys:
    if not rows:
        return StoredKeys((), (), None)
    raws, items = [row[0] for row in rows], [row[1] for row in rows]
    number = _column(items)
    _refuse((number < 0) | (number >= len(tensors.shapes)), "it refers to the item {}, which is no tensor's", number)
    if set(map(type, raws)) != {list} or not all(raws) or not _PATH_PARTS.issuperset(map(type, chain(*raws))):
        for raw in raws:
            _path(raw)
    parts = None
    if set(map(len, rows)) != {2}:
        parts = [_part(row[2:], tensors.shapes[row[1]]) if len(row) > 2 else None for row in rows]
    return StoredKeys(list(map(tuple, raws)), items, parts)


def _part(raw: Sequence[Any], shape: tuple[int, ...]) -> Part:
    whole, offsets = raw
    if not (isinstance(whole, list) and isinstance(offsets, list) and is_shape(whole) and is_shape(offsets)):
        raise ValueError(f"it has the part at {offsets!r:.200} of {whole!r:.200}")
    if not len(whole) == len(offsets) == len(shape):
        raise ValueError(f"it has a part of shape {shape} at {offsets!r:.200} of {whole!r:.200}")
    return tuple(whole), tuple(offsets)


def _path(raw: Any) -> Path:
    """The path of a value: the state itself has none."""
    if not isinstance(raw, list) or not raw or not _PATH_PARTS.issuperset(map(type, raw)):
        raise ValueError(f"it has the key {raw!r:.200}")
    return tuple(raw)


def tensor_items(
    rows: Sequence[Any], checksums: Sequence[int], names: Sequence[str], sizes: Sequence[int]
) -> TensorItems:
    """The items of tensors, of rows that a file claims.

    Args:
        rows: file number, offset, length, offset of the payload, dtype, shape.
        checksums: exact ints, one a row.
        names: files, by number.
        sizes: of the files.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RuntimeError: a row that cannot be true.
    """
    if not rows:
        none = torch.empty(0, dtype=torch.int64)
        return TensorItems(names, none, none, none, none, none, (), (), ())
    files, offsets, lengths, payloads, kinds, raw_shapes = zip(*rows, strict=True)
    for kind in set(kinds):
        if kind not in DTYPES:
            raise ValueError(f"it names the dtype {kind!r:.200}, which this torch does not have")
    dtypes, shapes = list(map(DTYPES.__getitem__, kinds)), list(map(tuple, raw_shapes))
    elements = _elements(shapes)
    file, offset, length, payload = map(_column, (files, offsets, lengths, payloads))
    itemsize = _column([dtype.itemsize for dtype in dtypes])
    # Their product could overflow.
    _refuse(
        elements > length // itemsize, "{} elements do not fit the item at {} of {} bytes", elements, offset, length
    )
    nbytes = elements * itemsize
    _refuse((file < 0) | (file >= len(names)), "it has an item in the file number {}", file)
    size = _column(sizes).index_select(0, file)
    _refuse((offset < 0) | (length < 0), "it has an item at {} of {} bytes", offset, length)
    # The differences below cannot overflow, because a file has fewer than 2^63 bytes.
    _refuse(
        (offset > size) | (length > size - offset),
        "its item at {} of {} bytes ends behind its file of {} bytes",
        *(offset, length, size),
    )
    _refuse(
        (payload < offset) | (payload - offset > length - nbytes),
        "{} bytes at {} do not fit the item at {} of {} bytes",
        *(nbytes, payload, offset, length),
    )
    return TensorItems(names, file, offset, length, payload, nbytes, checksums, dtypes, shapes)


def _elements(shapes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """How many elements tensors of these shapes have, each a possible shape."""
    sizes = list(chain.from_iterable(shapes))
    # A size of 0 hides what the others come to.
    if not set(map(type, sizes)) <= {int} or min(sizes, default=1) < 1 or max(map(len, shapes)) > MAX_DIMENSIONS:
        for shape in shapes:
            if not is_shape(shape):
                raise ValueError(f"it has an item of the shape {list(shape)!r:.200}")
    counts = list(map(math.prod, shapes))
    if max(counts) >= MAX_ELEMENTS:
        raise ValueError(f"it has an item of the shape {list(shapes[counts.index(max(counts))])!r:.200}")
    return _column(counts)


def _column(values: Sequence[Any]) -> torch.Tensor:
    """Exact ints of 64 bits, at least one, as a tensor.

    Raises:
        ValueError: something else is among them.
        OverflowError: one has more bits.
    """
    _check_ints(values)
    return column_of(values)


def _check_ints(values: Sequence[Any]) -> None:
    """Refuse what is no exact int, such as True."""
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise ValueError(f"it has {wrong!r:.200} where a whole number is expected")


def _refuse(wrong: torch.Tensor, text: str, *columns: torch.Tensor) -> None:
    """Raise ValueError where `wrong` holds; the columns give the numbers of the first such place for the text."""
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(text.format(*(int(each[first]) for each in columns)))
