"""The index of what a rank wrote, item by item, from its integrity file. Validated before anything is read by it.

Validation works on whole columns: checking many small items one by one would take longer than reading them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add, itemgetter, le, mul
from typing import Any, NamedTuple

from ..core.commit.names import integrity_name
from ..core.storage.checksum import Checksum, ChecksumMissingError, find_checksum, install_text
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..state.coverage import MAX_DIMENSIONS, MAX_ELEMENTS, is_shape
from ..state.dtypes import WIDTHS
from ..state.paths import Path, is_class_kind

_MAX_INDEX_BYTES = 1 << 30
_PATH_PARTS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = frozenset({"list", "odict", "empty"})

#: In place of the algorithm's name where there are no checksums.
NO_CHECKSUM = "none"

#: A part of a whole tensor: the shape of the whole, and the part's offsets in it.
Part = tuple[tuple[int, ...], tuple[int, ...]]


class StoredRange(NamedTuple):
    """A range of a file: a stored part of a tensor, or an object.

    Attributes:
        file: name of the file
        offset: start of the range in the file, in bytes
        length: length of the range, which its checksum covers
        payload: offset of the tensor's bytes in the file; None: it is only known when the range is read
        offsets: offsets of the part in the whole tensor, one for each dimension
        shape: shape of the part
        checksum: unsigned, up to 64 bits; None: there is none
        checksum_kind: its algorithm, such as `crc32`; None without one
        view: offset and strides, in elements, of a tensor that is not contiguous in the range
    """

    file: str
    offset: int
    length: int
    payload: int | None
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    checksum: int | None = None
    checksum_kind: str | None = None
    view: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.length


@dataclass(frozen=True)
class ItemColumns:
    """The tensor items of one rank, a column for each property.

    Attributes:
        names: file names, by number
        files: numbers of the files
        offsets: offsets of the items in their files
        lengths: lengths of the items
        payloads: offsets of the tensors' bytes in the files
        nbytes: lengths of the tensors' bytes
        checksums: checksums of the items, unsigned, up to 64 bits
        dtypes, shapes: dtypes, by name, and shapes of the tensors
    """

    names: Sequence[str]
    files: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    payloads: Sequence[int]
    nbytes: Sequence[int]
    checksums: Sequence[int]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class RankIndex:
    """What one rank wrote.

    Attributes:
        checksum: name of the items' checksum algorithm, or `NO_CHECKSUM`
        tensors: items of tensors
        extras: ranges of objects; their numbers continue those of the tensors
        paths: paths of the tensors in the state; empty for a format that has its own index
        numbers: numbers of the tensors' items, one per path
        parts: the part that each tensor is of a whole, or None for a whole tensor; None if all are whole, the usual
            case
        objects: paths of objects with their ranges
        containers: as `FlatState.containers`
    """

    checksum: str
    tensors: ItemColumns
    extras: list[StoredRange]
    paths: Sequence[Path]
    numbers: Sequence[int]
    parts: Sequence[Part | None] | None
    objects: list[tuple[Path, StoredRange]]
    containers: list[tuple[Path, str]]

    def range_of(self, number: int) -> StoredRange:
        """The range of a tensor's item, as if it were a whole one."""
        tensors, shape = self.tensors, self.tensors.shapes[number]
        place = (tensors.offsets[number], tensors.lengths[number], tensors.payloads[number])
        checksum = (None, None) if self.checksum == NO_CHECKSUM else (tensors.checksums[number], self.checksum)
        return StoredRange(tensors.names[tensors.files[number]], *place, (0,) * len(shape), shape, *checksum)

    def ranges(self) -> list[StoredRange]:
        """All ranges of the rank, of tensors and of objects."""
        return [*map(self.range_of, range(len(self.tensors.offsets))), *self.extras]


def read_rank_indexes(
    fs: Storage,
    folder: str,
    manifest: Mapping[str, Any],
    ranks: Sequence[int] | None = None,
) -> list[RankIndex]:
    """Read the indexes of ranks, each verified against the manifest.

    Args:
        fs: the file system
        folder: the folder of the checkpoint's files
        manifest: the manifest, from `read_manifest`
        ranks: the ranks to read; None: all ranks of the manifest

    Raises:
        CheckpointCorruptError: an index is missing, damaged, or invalid
        CheckpointUnreadableError: an index cannot be read
    """
    entries = {entry["name"]: entry for entry in manifest["files"]}
    indexes = []
    for rank in range(manifest["world_size"]) if ranks is None else ranks:
        name = integrity_name(rank)
        path = os.path.join(folder, name)
        if "crc32" not in entries.get(name, {}):
            raise CheckpointCorruptError(f"manifest.json in {folder} does not list {name} with its checksum.")
        try:
            data = fs.read_verified(path, _MAX_INDEX_BYTES, entries[name]["crc32"])
        except OSError as error:
            raise read_failure(path, error) from error
        if data is None:
            raise CheckpointCorruptError(
                f"{path} does not match its checksum in manifest.json; one of the two is damaged."
            )
        try:
            indexes.append(parse_rank_index(json.loads(data), entries))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} is invalid: {type(error).__name__}: {error}.") from error
    return indexes


def checksum_of(folder: str, name: str) -> Checksum:
    """The algorithm of this name, with which a checkpoint was saved.

    Raises:
        CheckpointLoadError: it cannot be computed here; the text says what to install
    """
    try:
        return find_checksum(name)
    except ChecksumMissingError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {name}, whose package is not installed here: "
            f"{install_text(name)}, or load it unverified with checkpoint.verify=off."
        ) from error
    except ValueError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {name!r:.200}, which this release does not know; load it "
            "with the release that wrote it, or unverified with checkpoint.verify=off."
        ) from error


def parse_rank_index(content: Any, entries: Mapping[str, Any]) -> RankIndex:
    """Validate the content of an integrity file.

    Args:
        content: it, as JSON has it
        entries: for each file by its name, its `size` in bytes

    Raises:
        ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError: it is invalid
    """
    layout, blobs = content["layout"], content["extras"]
    rows, names = layout["items"], layout["files"]
    for name in [*names, *map(itemgetter(0), blobs)]:
        if name not in entries:
            raise ValueError(f"it refers to the file {name!r:.200}, which the manifest does not list")
    # Older checkpoints have no choice of algorithm and store the checksums under "crc32".
    algorithm, sums = (content["checksum"], content["sums"]) if "sums" in content else ("crc32", content["crc32"])
    if not isinstance(algorithm, str) or len(sums) != len(rows) + len(blobs):
        raise ValueError(f"it has {len(sums)} checksums of {algorithm!r:.200} for {len(rows) + len(blobs)} items")
    _check_ints(sums)
    count = len(rows)  # checksums of tensors come first
    tensors = item_columns(rows, sums[:count], names, [entries[name]["size"] for name in names])
    extras = []
    for (name, offset, length), checksum in zip(blobs, sums[count:], strict=True):
        _check_ints((offset, length))
        if min(offset, length) < 0 or offset + length > entries[name]["size"]:
            raise ValueError(f"it has an item at {offset} of {length} bytes in {name}")
        summed = (None, None) if algorithm == NO_CHECKSUM else (checksum, algorithm)
        extras.append(StoredRange(name, offset, length, offset, (), (), *summed))
    keys = layout.get("keys", ())
    paths, numbers = _paths(map(itemgetter(0), keys)), list(map(itemgetter(1), keys))
    _check_ints(numbers)
    for number in (min(numbers), max(numbers)) if numbers else ():
        if not 0 <= number < count:
            raise ValueError(f"it refers to the item {number!r:.200}, which is no tensor's")
    parts = None
    if not set(map(len, keys)) <= {2}:
        parts = [_part(row[2:], tensors.shapes[row[1]]) if len(row) > 2 else None for row in keys]
    objects: list[tuple[Path, StoredRange]] = []
    containers: list[tuple[Path, str]] = []
    for raw, number in layout.get("objects", ()):
        if type(number) is not int or not count <= number < len(sums):
            raise ValueError(f"it refers to the item {number!r:.200}, which is no object's")
        objects.append((_paths([raw])[0], extras[number - count]))
    for name, is_known in (("containers", _CONTAINERS.__contains__), ("classes", is_class_kind)):
        for raw, kind in layout.get(name, ()):
            if not is_known(kind):
                raise ValueError(f"it has a container of the unknown kind {kind!r:.200}")
            containers.append((_paths([raw])[0] if raw else (), kind))
    return RankIndex(algorithm, tensors, extras, paths, numbers, parts, objects, containers)


def _paths(raws: Iterable[Any]) -> list[Path]:
    """Convert paths of values, which must not be empty, to tuples."""
    raws = list(raws)
    if not set(map(type, raws)) <= {list} or not all(raws) or not _PATH_PARTS.issuperset(map(type, chain(*raws))):
        valid = (type(raw) is list and bool(raw) and _PATH_PARTS.issuperset(map(type, raw)) for raw in raws)
        raise ValueError(f"it has the key {raws[list(valid).index(False)]!r:.200}")
    return list(map(tuple, raws))


def _part(raw: Sequence[Any], shape: tuple[int, ...]) -> Part:
    whole, offsets = raw
    if not (isinstance(whole, list) and isinstance(offsets, list) and is_shape(whole) and is_shape(offsets)):
        raise ValueError(f"it has the part at {offsets!r:.200} of {whole!r:.200}")
    if not len(whole) == len(offsets) == len(shape):
        raise ValueError(f"it has a part of shape {shape} at {offsets!r:.200} of {whole!r:.200}")
    return tuple(whole), tuple(offsets)


def item_columns(
    rows: Sequence[Any],
    checksums: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
) -> ItemColumns:
    """Validate rows of an untrusted file and convert them to columns.

    Args:
        rows: file number, offset, length, offset of the payload, dtype and shape of each item
        checksums: one int per row
        names: file names, by number
        sizes: sizes of the files

    Raises:
        ValueError, TypeError, KeyError: a row is invalid
    """
    if not rows:
        return ItemColumns(names, (), (), (), (), (), checksums, (), ())
    files, offsets, lengths, payloads, dtypes, raw_shapes = zip(*rows, strict=True)
    for dtype in set(dtypes):
        if dtype not in WIDTHS:
            raise ValueError(f"it names the dtype {dtype!r:.200}, which is not supported here")
    shapes = list(map(tuple, raw_shapes))
    dimensions = list(chain.from_iterable(shapes))
    _check_ints(dimensions)
    elements = list(map(math.prod, shapes))
    # All at once; one by one only with a size of 0, which hides how large the others are, or to name the invalid shape.
    if min(dimensions, default=1) < 1 or max(elements) >= MAX_ELEMENTS or max(map(len, shapes)) > MAX_DIMENSIONS:
        for shape in shapes:
            if not is_shape(shape):
                raise ValueError(f"it has an item of the shape {list(shape)!r:.200}")
    for column in (files, offsets, lengths, payloads):
        _check_ints(column)
    nbytes = list(map(mul, elements, map(WIDTHS.__getitem__, dtypes)))
    if min(files) < 0 or max(files) >= len(names):
        raise ValueError(f"it has an item in the file number {min(files) if min(files) < 0 else max(files)}")
    ends = list(map(add, offsets, lengths))
    if not (
        min(offsets) >= 0
        and min(lengths) >= 0
        and all(map(le, ends, map(sizes.__getitem__, files)))
        and all(map(le, offsets, payloads))
        and all(map(le, map(add, payloads, nbytes), ends))
    ):
        for row in zip(offsets, lengths, payloads, nbytes, map(sizes.__getitem__, files), strict=True):
            _check_place(*row)
    return ItemColumns(names, files, offsets, lengths, payloads, nbytes, checksums, dtypes, shapes)


def _check_place(offset: int, length: int, payload: int, nbytes: int, size: int) -> None:
    """Refuse an item that is outside of its file, or whose payload is outside of the item."""
    if offset < 0 or length < 0:
        raise ValueError(f"it has an item at {offset} of {length} bytes")
    if offset + length > size:
        raise ValueError(f"its item at {offset} of {length} bytes ends behind its file of {size} bytes")
    if payload < offset or payload + nbytes > offset + length:
        raise ValueError(f"{nbytes} bytes at {payload} do not fit the item at {offset} of {length} bytes")


def _check_ints(values: Sequence[Any]) -> None:
    """Refuse values that are not exactly of type int, such as True."""
    if not set(map(type, values)) <= {int}:
        misfit = next(value for value in values if type(value) is not int)
        raise ValueError(f"it has {misfit!r:.200} where a whole number is expected")
