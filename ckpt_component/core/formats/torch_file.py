"""Entries of a file of `torch.save`, from its pickle, which is not run: tensors and objects are inert records."""

from __future__ import annotations

import math
import os
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from ...errors import CheckpointCorruptError, CheckpointLoadError
from ..commit.names import CHECKSUMS
from ..state.coverage import is_shape
from ..state.dtypes import WIDTHS
from ..state.paths import TAG, Path, key_of
from ..storage.safe_open import read_failure
from ..storage.storage import Storage
from .entries import Entry, Piece
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


class _View(NamedTuple):
    """A tensor of a pickle: a view of a storage. Offset and strides count elements."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Storage(NamedTuple):
    dtype: str
    key: str


def torch_file_entries(fs: Storage, folder: str, name: str) -> dict[str, Entry]:
    """The entries of one file.

    Tensors have the piece of the file that is their storage; its `payload` is None for a tensor that is not contiguous
    there. All objects have the pickle as their piece.

    Args:
        fs: The storage.
        folder: The folder of the file.
        name: The name of the file.

    Raises:
        CheckpointCorruptError: It is not a regular file, is damaged, or claims more data than it has.
        CheckpointUnreadableError: It cannot be read.
        CheckpointLoadError: It was saved by torch before 1.6, or does not contain a state dict.
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

    def piece(member: zipfile.ZipInfo, payload: bool = False) -> Piece:
        seek_to(stream, member, path)
        start = stream.tell()
        checksum = (member.CRC, "crc32") if summed else (None, None)
        return Piece(name, start, member.file_size, start if payload else None, (), (), *checksum)

    whole = piece(members[pickle_name], payload=True)
    stream.seek(whole.offset)
    claims: dict[str, int] = {}

    def storage(reference: Sequence[Any]) -> _Storage:
        dtype, key, count = storage_of(reference)
        claims[key] = max(count * WIDTHS[dtype], claims.get(key, 0))
        return _Storage(dtype, key)

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
    pieces = {key: piece(members[prefix + key]) for key in claims}
    for place, value in flat:
        key = key_of(place)
        if value is None:
            yield key, Entry(key, place, "object", "", (), 0, (whole,))
            continue
        width, stored = WIDTHS[value.dtype], pieces[value.storage]
        nbytes, start = math.prod(value.shape) * width, value.offset * width
        payload = stored.offset + start if _is_contiguous(value) else None
        if payload is not None and start + nbytes > stored.length:
            raise CheckpointCorruptError(f"'{key}' in {path} has {nbytes} bytes at {start} of {stored.length}.")
        part = stored._replace(payload=payload, offsets=(0,) * len(value.shape), shape=value.shape)
        yield key, Entry(key, place, "tensor", value.dtype, value.shape, nbytes, (part,))


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


def with_checksums(entries: Mapping[str, Entry], items: Sequence[Piece]) -> dict[str, Entry]:
    """Entries of a file whose items are checksummed elsewhere: each piece becomes the item that contains it.

    Args:
        entries: The entries.
        items: The items of the file, from its rank's index.
    """
    items = sorted(items, key=lambda item: item.offset)
    starts = [item.offset for item in items]

    def summed(piece: Piece) -> Piece:
        item = items[bisect_right(starts, piece.offset) - 1] if starts else None
        if item is None or not item.offset <= piece.offset <= piece.offset + piece.length <= item.offset + item.length:
            return piece
        return item._replace(payload=piece.payload, offsets=piece.offsets, shape=piece.shape)

    return {key: entry._replace(pieces=tuple(map(summed, entry.pieces))) for key, entry in entries.items()}
