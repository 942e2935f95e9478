"""Safetensors files: their header, the index of a folder of them, and the writer of one file per rank."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ..core.storage.file_set import FileSet
from ..core.storage.safe_open import is_plain_name, place_of, read_failure
from ..core.storage.storage import Storage
from ..core.writing.request import EncodedSave
from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointStageError
from ..state.coverage import is_shape
from ..state.dtypes import SAFETENSORS, WIDTHS
from ..state.paths import CONTEXT, key_of
from .folder import INDEX
from .index import Contents, Index, Listing, contents_of
from .rank_index import NO_CHECKSUM, RankIndex, item_columns
from .writer import FormatPlan, Writer, dtype_name, extents_by_bytes, make_table, refuse_parts

if TYPE_CHECKING:
    from ..state.structure import Structure

#: Key, dtype, shape and bytes of a tensor.
Row = tuple[str, str, Sequence[int], int]

_METADATA = "__metadata__"


def header_of(rows: Sequence[Row], aliases: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header, padded so that the payloads after it start on a 64-byte boundary, and the order in which they follow.

    Args:
        rows: the tensors. The file has the widest dtypes first, so that every payload is
            aligned without gaps.
        aliases: other names of tensors, for the metadata, as `safetensors.torch.save_model` has them

    Raises:
        CheckpointStageError: the format does not have a dtype or a name
    """
    for key, dtype, *_ in rows:
        if dtype not in SAFETENSORS:
            raise CheckpointStageError(f"'{key}' is {dtype}, which safetensors files do not support; leave it out.")
    if _METADATA in {*aliases, *(key for key, *_ in rows)}:
        raise CheckpointStageError(f"'{_METADATA}' is a reserved name in safetensors files; rename the tensor.")
    entries: dict[str, Any] = {_METADATA: {"format": "pt", **aliases}}
    position = 0
    order = sorted(range(len(rows)), key=lambda number: (-WIDTHS[rows[number][1]], number))
    for number in order:
        key, dtype, shape, nbytes = rows[number]
        end = position + nbytes
        entries[key] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text, order


_MAX_HEADER = 100 << 20
_DTYPES = {text: dtype for dtype, text in SAFETENSORS.items()}


class SafetensorsFile(Index):
    """A safetensors file of another program."""

    format = "safetensors (file)"
    weight_map: Mapping[str, str] | None = None

    def __init__(self, found: Listing) -> None:
        folder, name = place_of(*os.path.split(found.weights))
        super().__init__(found, folder, [name])
        self.where = found.weights

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """By the name of the file."""
        return found.weights.endswith(".safetensors")

    @cached_property
    def contents(self) -> Contents:
        """By the headers."""
        columns = safetensors_index(self.storage, self.where, self.folder, self.names, self.weight_map)
        return contents_of(self.where, [columns])


class SafetensorsShards(SafetensorsFile):
    """Safetensors files that are a checkpoint together, as Hugging Face writes them."""

    format = "safetensors (index)"

    def __init__(self, found: Listing) -> None:
        weight_map = _weight_map(found.storage, os.path.join(*place_of(*os.path.split(found.weights))))
        places = {shard: place_of(found.path, shard) for shard in dict.fromkeys(weight_map.values())}
        folder, *others = dict.fromkeys(place for place, _ in places.values())
        if others:
            raise CheckpointCorruptError(f"{found.path} has some of its files in {folder} and some in {others[0]}.")
        self.weight_map = {key: places[shard][1] for key, shard in weight_map.items()}
        Index.__init__(self, found, folder, [name for _, name in places.values()])

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """By the name of the index in the folder."""
        return found.weights != found.path and found.weights.endswith(INDEX)


def safetensors_index(
    fs: Storage, where: str, folder: str, names: Sequence[str], weight_map: Mapping[str, str] | None = None
) -> RankIndex:
    """The index of what safetensors files hold, from their headers, without checksums.

    Args:
        fs: the storage
        where: the checkpoint's path, for messages
        folder: the folder of the files
        names: their names
        weight_map: the file of each key, as the index of a sharded checkpoint has it; None: not compared

    Raises:
        CheckpointCorruptError: a file is not a regular file, or its header is invalid: a duplicate key, or offsets that
            overlap, leave gaps, or do not fit shape and dtype or the file. Or the files contradict `weight_map`.
        CheckpointUnreadableError: a file cannot be read
        CheckpointLoadError: a dtype is not supported
    """
    rows: list[tuple[Any, ...]] = []
    sizes: list[int] = []
    numbers: dict[str, int] = {}
    with fs.open_files(folder) as files:
        for file, name in enumerate(names):
            path = os.path.join(folder, name)
            sizes.append(files.size(name))
            header, start = _read_header(path, files, name, sizes[-1])
            metadata = header.pop("__metadata__", {})
            tensors = [_tensor(path, key, entry) for key, entry in header.items()]
            places = dict(zip(header, (place for _, _, place in tensors), strict=True))
            _check_contiguous(path, places, sizes[-1] - start)
            for key, (dtype, shape, (begin, end)) in zip(header, tensors, strict=True):
                if key in numbers:
                    other = names[rows[numbers[key]][0]]
                    raise CheckpointCorruptError(f"'{key}' in {folder} is in two files, {other} and {name}.")
                if weight_map is not None and weight_map.get(key) != name:
                    there = f"has it in {weight_map[key]!r:.200}" if key in weight_map else "does not have it"
                    raise CheckpointCorruptError(f"'{key}' is in {path}, and the index of {where} {there}.")
                numbers[key] = len(rows)
                rows.append((file, start + begin, end - begin, start + begin, dtype, shape))
            # The library's save_model records the names of tied tensors in the metadata.
            for alias, kept in (metadata if isinstance(metadata, dict) else {}).items():
                if isinstance(kept, str) and kept in header and alias not in header:
                    numbers.setdefault(alias, numbers[kept])
    for key in weight_map or ():
        if key not in numbers:
            raise CheckpointCorruptError(f"The index of {where} lists '{key}', and no file there has it.")
    items = item_columns(rows, [0] * len(rows), names, sizes)
    paths = [(key,) for key in numbers]
    return RankIndex(NO_CHECKSUM, items, [], paths, list(numbers.values()), None, [], [])


def _weight_map(fs: Storage, path: str) -> dict[str, str]:
    """The index of a sharded Hugging Face checkpoint: the name of the file of each key.

    Raises:
        CheckpointCorruptError: it is not a valid index, or names something other than a file beside it
        CheckpointUnreadableError: it cannot be read
    """
    try:
        data = fs.read(path, _MAX_HEADER)
    except OSError as error:
        raise read_failure(path, error) from error
    try:
        weight_map = json.loads(data, object_pairs_hook=_unique)["weight_map"]
        for key, name in weight_map.items():
            if not is_plain_name(name):
                raise CheckpointCorruptError(f"{path} has '{key}' in {name!r:.200}, which is not a plain name.")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointCorruptError):
            raise
        raise CheckpointCorruptError(f"{path} is not an index with a weight_map ({error}).") from error
    if not weight_map:
        raise CheckpointCorruptError(f"{path} has an empty weight_map.")
    return cast("dict[str, str]", weight_map)


def _read_header(path: str, files: FileSet, name: str, size: int) -> tuple[dict[str, Any], int]:
    length = memoryview(bytearray(8))
    if not files.fill(name, length, 0):
        raise CheckpointCorruptError(f"{path} is too short for a safetensors file.")
    (count,) = struct.unpack("<Q", length)
    if count > min(_MAX_HEADER, size - 8):
        raise CheckpointCorruptError(f"{path} claims a header of {count} bytes and has {size} in all.")
    text = memoryview(bytearray(count))
    files.fill(name, text, 8)
    try:
        header = json.loads(bytes(text), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} has a header that is not JSON ({error}).") from error
    return header, 8 + count


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, of which JSON silently uses the last."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def _tensor(path: str, key: str, entry: Any) -> tuple[str, list[int], tuple[int, int]]:
    """Dtype, shape, and byte range of one tensor, relative to the end of the header."""
    values = [entry.get(name) for name in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    name, shape, place = values
    if not isinstance(name, str) or not isinstance(shape, list) or not is_shape(shape):
        raise CheckpointCorruptError(f"'{key}' in {path} has the dtype {name!r:.200} and the shape {shape!r:.200}.")
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise CheckpointLoadError(f"'{key}' in {path} has the dtype {name:.200}, which is not supported.")
    if not isinstance(place, list) or len(place) != 2 or any(type(end) is not int or end < 0 for end in place):
        raise CheckpointCorruptError(f"'{key}' in {path} has the offsets {place!r:.200}.")
    begin, end = place
    if end - begin != math.prod(shape) * WIDTHS[dtype]:
        raise CheckpointCorruptError(
            f"'{key}' in {path} has {end - begin} bytes at {begin}, which do not fit {dtype} of shape {tuple(shape)}."
        )
    return dtype, shape, (begin, end)


def _check_contiguous(path: str, places: Mapping[str, tuple[int, int]], size: int) -> None:
    """Check that the tensors fill the file without gaps or overlaps, as the format requires."""
    position = 0
    for key, (begin, end) in sorted(places.items(), key=lambda entry: entry[1]):
        if begin != position:
            raise CheckpointCorruptError(
                f"'{key}' in {path} begins at {begin}, and the tensor before it ends at {position}: the offsets "
                f"{'overlap' if begin < position else 'leave a hole'}."
            )
        position = end
    if position != size:
        raise CheckpointCorruptError(f"{path} has {size} bytes of tensors, and its offsets end at {position}.")


def file_name(rank: int) -> str:
    """`checkpoint_<rank>.safetensors`."""
    return f"checkpoint_{rank}.safetensors"


class SafetensorsWriter(Writer):
    """The safetensors format. Refuses, by key, anything but tensors and containers.

    Of a tensor made of tensors it has these alone: what else it is, a target knows.
    """

    format = "safetensors"

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out `checkpoint_<rank>.safetensors`."""
        return SafetensorsPlan(self, structure, file_name(rank))


class SafetensorsPlan(FormatPlan):
    """One safetensors file.

    Args:
        writer: the format
        structure: the structure to lay out
        name: name of the file
    """

    def __init__(self, writer: Writer, structure: Structure, name: str) -> None:
        from ..core.image.layout import (  # imports torch, which a reader of headers does not need
            ImageFile,
            Item,
            Layout,
        )

        others = [path for path in structure.object_paths if path[-1] != CONTEXT]
        if others:
            examples = ", ".join(f"'{key_of(path)}'" for path in others[:3])
            more = len(others) - 3
            raise CheckpointStageError(
                f"safetensors files hold tensors only, and {examples}{f' and {more} more' if more > 0 else ''} "
                "are not; save just the model's tensors, or use checkpoint/writer=dcp."
            )
        refuse_parts(structure, "safetensors")
        structure = copy.copy(structure)
        structure.object_paths = []
        stored = structure.stored
        header, order = _header(structure)
        items, size = [], len(header)
        for number in order:
            nbytes = stored[number].nbytes
            items.append(Item(number, 0, size, size, nbytes, nbytes))
            size += nbytes
        file = ImageFile(name, 0, size)
        self.layout = Layout(structure, tuple(stored), (file,), items, size, ((0, header),))
        self._encoded = EncodedSave(make_table(writer, self.layout, extents_by_bytes(self.layout, writer.workers)))

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """There are no objects, so the result is always the same."""
        return self._encoded


def _header(structure: Structure) -> tuple[bytes, list[int]]:
    """The header of the file, and the order in which the payloads follow."""
    keys = [key_of(structure.tensor_paths[entry.tensor]) for entry in structure.stored]
    aliases = {
        key_of(structure.tensor_paths[number]): keys[stored]
        for number, stored in enumerate(structure.stored_of)
        if structure.stored[stored].tensor != number
    }
    rows = [
        (key, dtype_name(entry.dtype), entry.shape, entry.nbytes)
        for key, entry in zip(keys, structure.stored, strict=True)
    ]
    return header_of(rows, aliases)
