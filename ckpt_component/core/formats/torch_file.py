"""Files of `torch.save`: entries from the pickle, which is not run. Tensors and objects are inert records."""

from __future__ import annotations

import math
import os
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import IO, Any, NamedTuple

from ...errors import CheckpointCorruptError, CheckpointLoadError
from ...state.coverage import is_shape
from ...state.dtypes import WIDTHS
from ...state.paths import TAG, Path, key_of
from ..commit.names import CHECKSUMS
from ..storage.safe_open import place_of, read_failure
from ..storage.storage import Storage
from .index import Contents, Entry, Index, Listing
from .rank_index import StoredRange
from .safe_unpickle import Record
from .torch_archive import (
    DATA,
    check_storages,
    foreign_pickle,
    load_state,
    members_of,
    seek_to,
    storage_of,
    storage_prefix,
)

_WRAPPED = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_REBUILT = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")


class TorchFile(Index):
    """A file of `torch.save`, which another program wrote, or which is one file of ours.

    Args:
        found: what is at the path
    """

    format = "torch_save (file)"

    def __init__(self, found: Listing) -> None:
        folder, name = place_of(*os.path.split(found.weights))
        super().__init__(found, folder, [name])
        self.where = os.path.join(folder, name)

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """Every file of weights that no other format has."""
        return bool(found.weights)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """In the order of the pickle."""
        return torch_file_entries(self.storage, self.folder, *self.names)

    @cached_property
    def contents(self) -> Contents:
        """By the pickle."""
        return Contents.of(self.entries.values())


class _View(NamedTuple):
    """A tensor of a pickle: a view of a storage. Offset and strides count elements."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _StorageRecord(NamedTuple):
    dtype: str
    key: str


def torch_file_entries(fs: Storage, folder: str, name: str) -> dict[str, Entry]:
    """The entries of one file, by key.

    Tensors have the range of the file that is their storage; its `payload` is None for a tensor that is not contiguous
    there. All objects have the pickle as their range.

    Args:
        fs: the storage
        folder: the folder of the file
        name: the name of the file

    Raises:
        CheckpointCorruptError: it is not a regular file, is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it was saved by torch before 1.6, or does not contain a state dict
    """
    path = os.path.join(folder, name)
    try:
        with fs.open_files(folder) as files, files.stream(name) as stream:
            return dict(_entries(stream, files.size(name), path, name))
    except OSError as error:
        raise read_failure(path, error) from error


def _entries(stream: IO[bytes], size: int, path: str, name: str) -> Iterator[tuple[str, Entry]]:
    if not zipfile.is_zipfile(stream):
        raise CheckpointLoadError(
            f"{path} is not a zip archive, as torch.save writes since 1.6, and no safetensors file; if torch "
            "before 1.6 saved it, ckpt import reads it."
        )
    members = members_of(stream, size, path)
    pickle_name = next((each for each in members if each.rpartition("/")[2] == DATA), None)
    if pickle_name is None:
        raise CheckpointCorruptError(f"{path} has no {DATA}, so it is not a torch.save archive.")
    # torch may omit them: they are then 0.
    summed = any(each.endswith(f"/{CHECKSUMS}") for each in members) or all(
        member.CRC for member in members.values() if member.file_size
    )

    def stored_range(member: zipfile.ZipInfo, payload: bool = False) -> StoredRange:
        seek_to(stream, member, path)
        start = stream.tell()
        checksum = (member.CRC, "crc32") if summed else (None, None)
        return StoredRange(name, start, member.file_size, start if payload else None, (), (), *checksum)

    whole = stored_range(members[pickle_name], payload=True)
    stream.seek(whole.offset)
    claims: dict[str, int] = {}

    def storage(reference: Sequence[Any]) -> _StorageRecord:
        dtype, key, count = storage_of(reference)
        claims[key] = max(count * WIDTHS[dtype], claims.get(key, 0))
        return _StorageRecord(dtype, key)

    try:
        state = load_state(stream.read(whole.length), storage)
        flat = list(_flattened((), state)) if isinstance(state, dict) else None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise foreign_pickle(path, error) from error
    if flat is None:
        kind = state.kind if isinstance(state, Record) else type(state).__name__
        raise CheckpointLoadError(f"{path} holds a {kind}, not a state dict.")
    prefix = storage_prefix(pickle_name)
    check_storages(claims.items(), prefix, members, path)
    ranges = {key: stored_range(members[prefix + key]) for key in claims}
    for place, value in flat:
        key = key_of(place)
        if value is None:
            yield key, Entry(key, place, "", (), 0, (whole,))
            continue
        width, stored = WIDTHS[value.dtype], ranges[value.storage]
        nbytes, start = math.prod(value.shape) * width, value.offset * width
        if not _is_contiguous(value):
            stored = stored._replace(view=(value.offset, *value.stride))
        elif start + nbytes > stored.length:
            raise CheckpointCorruptError(f"'{key}' in {path} has {nbytes} bytes at {start} of {stored.length}.")
        else:
            stored = stored._replace(payload=stored.offset + start)
        stored = stored._replace(offsets=(0,) * len(value.shape), shape=value.shape)
        yield key, Entry(key, place, value.dtype, value.shape, nbytes, (stored,))


def _flattened(path: Path, value: Any) -> Iterator[tuple[Path, _View | None]]:
    """The tensors below a value, and None for objects; the containers are those of `state.flatten`."""
    if isinstance(value, dict) and TAG not in value:
        for name, element in value.items():
            yield from _flattened((*path, name), element)
    elif _is_list(value):
        for position, element in enumerate(value):
            yield from _flattened((*path, position), element)
    else:
        yield path, _view_of(value)


def _is_list(value: Any) -> bool:
    """Whether a value is a list that holds something other than objects."""
    return isinstance(value, list) and any(
        (isinstance(each, dict) and TAG not in each) or _is_list(each) or _view_of(each) is not None for each in value
    )


def _view_of(value: Any) -> _View | None:
    """The tensor that a record stands for; None for an object."""
    if not isinstance(value, Record):
        return None
    if value.kind in _WRAPPED and value.args:
        return _view_of(value.args[0])
    if value.kind == "_rebuild_from_type_v2" and len(value.args) == 4:
        rebuild, _, arguments, _ = value.args
        return _view_of(rebuild(*arguments))
    if value.kind not in _REBUILT:
        return None
    storage, offset, shape, stride = value.args[:4]
    dtype = value.args[6].kind if value.kind == "_rebuild_tensor_v3" else storage.dtype
    if not (is_shape(shape) and is_shape(stride) and is_shape((offset,)) and dtype in WIDTHS):
        raise ValueError(f"it has a tensor of {dtype!r:.200} of the shape {shape!r:.200} at {offset!r:.200}")
    return _View(storage.key, dtype, offset, tuple(shape), tuple(stride))


def _is_contiguous(view: _View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return math.prod(view.shape) == 0
        expected *= size
    return True


def with_checksums(entries: Iterable[Entry], items: Sequence[StoredRange]) -> Iterator[Entry]:
    """Entries of a file whose items are checksummed elsewhere: each range becomes the item that contains it.

    Args:
        entries: the entries
        items: the items of the file, from its rank's index
    """
    items = sorted(items, key=lambda item: item.offset)
    starts = [item.offset for item in items]

    def summed(part: StoredRange) -> StoredRange:
        item = items[bisect_right(starts, part.offset) - 1] if starts else None
        if item is None or not item.offset <= part.offset <= part.offset + part.length <= item.offset + item.length:
            return part
        return item._replace(payload=part.payload, offsets=part.offsets, shape=part.shape, view=part.view)

    return (entry._replace(place=tuple(map(summed, entry.place))) for entry in entries)
