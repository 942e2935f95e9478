"""Exports that torch has to read: tensors of other programs, and a file of `torch.save` as torch writes it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..formats import Entry, Index
from ..formats.foreign import RefusedObject
from ..formats.open_source import open_source
from ..formats.source import Access, Request
from ..state import objects
from ..state.flatten import unflatten
from ..state.tensors import tensor_bytes
from .blocks import BLOCK_BYTES, TensorBlocks
from .export_files import File, Selected


class LoadedBlocks(TensorBlocks):
    """Reads tensors as a load does, for checkpoints of other programs and files of `torch.save`.

    Args:
        index: the checkpoint
    """

    def __init__(self, index: Index) -> None:
        super().__init__(index, ())
        self._source = open_source(index, Access(index.storage.open_files))

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """As `TensorBlocks.of`; one whole tensor is in memory."""
        value = torch.empty(entry.shape, dtype=self._source.dtype_of(entry), device="cpu")
        self._source.read_tensors([Request.into(entry.key, value)])
        data = tensor_bytes(value)
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    def item(self, entry: Entry) -> bytes:
        """As `TensorBlocks.item`."""
        value = self._source.read_objects([entry.key])[entry.key]
        return objects.dump(objects.encode(value, entry.key))


def torch_file(name: str, index: Index, selected: Selected) -> tuple[File, list[str]]:
    """Lay out one file. Tied tensors share a storage, also after loading.

    Args:
        name: its name
        index: the checkpoint, whose objects are loaded
        selected: what the file has

    Returns:
        The file, and the keys of the objects that safe loading does not create, which are left out.
    """
    keys = [entry.key for _, entry in selected.objects]
    objects = open_source(index, Access(index.storage.open_files)).read_objects(keys) if keys else {}
    refused = [key for key in keys if isinstance(objects[key], RefusedObject)]
    values: dict[Any, Any] = {path: objects[entry.key] for path, entry in selected.objects if entry.key not in refused}
    streamed = {}
    for tensor in selected.tensors:
        # Memory that is never touched, so there is none behind it.
        value = torch.empty(tensor.entry.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
        streamed[value.untyped_storage().data_ptr()] = tensor
        values |= dict.fromkeys((tensor.path, *(path for _, path in tensor.tied)), value)
    state, outline = unflatten(values, selected.containers), _SkippedData()
    with torch.serialization.skip_data():
        torch.save(state, outline)
    places = []
    # Storages are in the file in the order in which the pickler met them.
    storages = {storage.data_ptr(): storage for storage in _storages(state) if storage.nbytes()}
    for (address, storage), start in zip(storages.items(), outline.gaps, strict=True):
        if address in streamed:
            places.append((streamed[address], start))
        else:  # of a tensor inside an object
            data = bytes(tensor_bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)))
            outline.constants.append((start, data))
    return File(name, places, outline.constants), refused


class _SkippedData(io.BytesIO):
    """Takes a file of `torch.save` with `skip_data`, which seeks over the data of each storage.

    Attributes:
        constants: what was written, by position
        gaps: where the data of the storages begin
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: list[tuple[int, bytes]] = []
        self.gaps: list[int] = []
        self._position = 0

    def write(self, data: Any, /) -> int:
        """Take the next bytes."""
        self.constants.append((self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Leave a gap."""
        if whence != os.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save only seeks forward")
        if offset:
            self.gaps.append(self._position)
        self._position += offset
        return self._position


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of a state, in the order of its pickle."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (dict, list, tuple, set)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _storages(each)
