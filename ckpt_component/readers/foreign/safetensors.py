"""Safetensors files of other libraries. The header is validated as by the library, before anything is allocated."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import CheckpointCorruptError, CheckpointLoadError
from ...formats.safetensors import DTYPES
from ..file_set import FileSet
from ..own_format import OwnSource
from ..rank_index import RankIndex, tensor_items
from ..shapes import is_shape

_MAX_HEADER = 100 << 20
_DTYPE_OF = {text: dtype for dtype, text in DTYPES.items()}


class SafetensorsSource(OwnSource):
    """A safetensors file: read as our own, through an index built from its header, without checksums.

    Args:
        path: The file.
        shared: As for `FileSet`.

    Raises:
        CheckpointCorruptError: It is not a regular file, or its header is invalid: a duplicate key, or offsets that
            overlap, leave gaps, or do not fit shape and dtype or the file.
        CheckpointUnreadableError: It cannot be read.
        CheckpointLoadError: A dtype is not supported.
    """

    def __init__(self, path: str, *, shared: bool = True) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        with FileSet(folder) as files:
            size = os.fstat(files.descriptor(name)).st_size
            header, start = _read_header(path, files, name, size)
        metadata = header.pop("__metadata__", {})
        tensors = [_tensor(path, key, entry) for key, entry in header.items()]
        _check_contiguous(path, dict(zip(header, (place for _, _, place in tensors), strict=True)), size - start)
        rows = [
            (0, start + begin, end - begin, start + begin, str(dtype).removeprefix("torch."), shape)
            for dtype, shape, (begin, end) in tensors
        ]
        numbers = {key: number for number, key in enumerate(header)}
        # The library's save_model records the names of tied tensors in the metadata.
        for alias, kept in (metadata if isinstance(metadata, dict) else {}).items():
            if isinstance(kept, str) and kept in header and alias not in header:
                numbers[alias] = numbers[kept]
        items = tensor_items(rows, [0] * len(rows), [name], [size])
        paths = [(key,) for key in numbers]
        index = RankIndex("none", items, [], paths, list(numbers.values()), None, [], [])
        super().__init__(folder, [index], verify=False, shared=shared)
        self.where = path


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


def _tensor(path: str, key: str, entry: Any) -> tuple[torch.dtype, list[int], tuple[int, int]]:
    """Dtype, shape, and byte range of one tensor, relative to the end of the header."""
    values = [entry.get(name) for name in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    name, shape, place = values
    if not isinstance(name, str) or not isinstance(shape, list) or not is_shape(shape):
        raise CheckpointCorruptError(f"'{key}' in {path} has the dtype {name!r:.200} and the shape {shape!r:.200}.")
    dtype = _DTYPE_OF.get(name)
    if dtype is None:
        raise CheckpointLoadError(f"'{key}' in {path} has the dtype {name:.200}, which is not supported.")
    if not isinstance(place, list) or len(place) != 2 or any(type(end) is not int or end < 0 for end in place):
        raise CheckpointCorruptError(f"'{key}' in {path} has the offsets {place!r:.200}.")
    begin, end = place
    if end - begin != math.prod(shape) * dtype.itemsize:
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
