"""Which source reads what a rank loads of a checkpoint, by the format that its index has."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import torch

from ..core.libc import address_of
from ..core.progress import Progress, no_progress
from ..errors import CheckpointCorruptError, CheckpointLoadError
from .dcp_metadata import Megatron, StockDcp
from .foreign import MegatronSource, StateSource, StockDcpSource, TorchFileSource, load_stream
from .index import Contents, Index, Place
from .opening import OwnIndex, OwnTorchSave
from .ranges import RangeSource
from .rank_index import ItemColumns
from .source import DTYPES, Access, Request, Source, copy_into
from .torch_archive import TorchFile

#: In place of the number of an item.
_WITH_PICKLE = -1


class TorchSaveSource(RangeSource):
    """The file of one rank.

    Only the end of the file, with the pickle and the directory, is read here. A tensor that is stored whole is then
    read straight into the target; any other is a view of a storage, which is filled first.

    Args:
        index: the checkpoint
        rank: the rank
        access: how it is read

    Raises:
        CheckpointCorruptError: the file is damaged, or does not fit its index
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it does not contain a state dict of plain data, or a checksum cannot be computed here
    """

    def __init__(self, index: OwnTorchSave, rank: int, access: Access) -> None:
        name, columns = index.file_of(rank), index.columns([rank])
        super().__init__(index, Contents(columns=columns), access)
        self.where = os.path.join(index.folder, name)
        self._columns = columns[0].tensors
        ends = [piece for piece in columns[0].extras if piece.file == name]
        if len(ends) != 1 or not {name}.issuperset(self._columns.names):
            raise CheckpointCorruptError(f"The index of {self.where} does not say where its pickle is.")
        if unknown := {*self._columns.dtypes} - DTYPES.keys():
            raise CheckpointLoadError(f"{self.where} has tensors of {min(unknown)}, which this torch does not have.")
        end = memoryview(bytearray(ends[0].length))
        with self._open() as files, files.stream(name) as stream:
            self._fill(ends[0], [end], "the pickle", files)
            outline = _FileWithoutTensors(stream, ends[0].offset, end, self._columns)
            self._state = StateSource(load_stream(outline, files.size(name), self.where), self.where)
        containers = [*self._state.contents.containers, *columns[0].containers]
        self.contents = replace(self._state.contents, containers=containers, columns=columns)
        self._filled: set[int] = set()
        #: Key -> number of the item that has the tensor. Those that are stored with the pickle are there already.
        self._numbers: dict[str, int] = {}
        for key, tensor in self._state.tensors.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            number = outline.items.get(storage.data_ptr())
            if number is None:
                raise CheckpointCorruptError(f"'{key}' in {self.where} has bytes that the index does not list.")
            if number != _WITH_PICKLE:
                self._numbers[key] = number

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read whole tensors straight into their destinations, and copy others from their storages."""
        direct: list[tuple[Request, Place]] = []
        views = []
        for request in requests:
            number = self._numbers.get(request.key)
            if number is not None and self._is_whole(self._state.tensors[request.key], number):
                direct.append((request, (0, number)))
            else:
                views.append(request)
        self._fill_storages([request.key for request in views], direct, progress)
        for request in views:
            copy_into(request.destination, request.part_of(self._state.tensors[request.key]), request.key)

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """The tensors that torch made, whose storages are filled."""
        tensors = {key: self._state.tensors[key] for key in keys}
        self._fill_storages(tensors, [], progress)
        return tensors

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the objects, which came with the pickle."""
        return self._state.read_objects(keys)

    def _is_whole(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether a tensor is exactly what an item has."""
        item = DTYPES.get(self._columns.dtypes[number]), self._columns.shapes[number]
        return (tensor.dtype, tuple(tensor.shape)) == item and tensor.is_contiguous() and not tensor.storage_offset()

    def _fill_storages(self, keys: Iterable[str], others: Iterable[tuple[Request, Place]], progress: Progress) -> None:
        """Fill the storages of tensors that are not filled yet, and read what else is wanted."""
        numbers = {self._numbers[key]: key for key in keys if key in self._numbers}
        wanted = [*others]
        for number in numbers.keys() - self._filled:
            key = numbers[number]
            flat = torch.empty(0, dtype=DTYPES[self._columns.dtypes[number]], device="cpu")
            storage = self._state.tensors[key].untyped_storage()
            flat.set_(storage, 0, self._columns.shapes[number])  # type: ignore[call-overload]
            wanted.append((Request.into(key, flat), (0, number)))
        self._read(wanted, progress)
        self._filled |= numbers.keys()


class _FileWithoutTensors(io.RawIOBase):
    """A file of `torch.save` for torch to load, without the bytes of its tensors.

    torch reads each record straight into the memory of a storage. Here that memory stays as it is, until it is filled.

    Args:
        stream: the file
        end: where its last part begins, with the pickle and the directory
        data: the last part
        columns: the tensors before it

    Attributes:
        items: address of a storage -> number of the item that it waits for, `_WITH_PICKLE` if it has its bytes
    """

    def __init__(self, stream: IO[bytes], end: int, data: memoryview, columns: ItemColumns) -> None:
        self._stream = stream
        self._end = end
        self._data = data
        self._position = 0
        #: Place and length of a payload -> number of its item.
        self._payloads = {
            place: number for number, place in enumerate(zip(columns.payloads, columns.nbytes, strict=True))
        }
        self.items: dict[int, int] = {}

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position in the file."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position in the file."""
        base = (0, self._position, self._end + len(self._data))[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes, but nothing where they are a tensor's."""
        start = self._position
        count = max(min(len(buffer), self._end + len(self._data) - start), 0)
        self._position += count
        if not count:
            return 0
        view = memoryview(buffer)[:count]
        number = self._payloads.get((start, count))
        self.items.pop(address_of(view), None)  # of a storage that was freed
        if number is not None:
            self.items[address_of(view)] = number
            return count
        before = max(min(count, self._end - start), 0)
        if before:
            self._stream.seek(start)
            self._stream.readinto(view[:before])  # type: ignore[attr-defined]
        else:
            self.items[address_of(view)] = _WITH_PICKLE
        view[before:] = self._data[start + before - self._end :][: count - before]
        return count


def open_source(index: Index, access: Access, rank: int = 0, world_size: int = 1) -> Source:
    """What reads what a rank loads of a checkpoint.

    Args:
        index: the checkpoint
        access: how it is read
        rank: the rank
        world_size: number of ranks

    Raises:
        CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`
    """
    if isinstance(index, OwnIndex):
        if index.per_rank and index.world_size not in (1, world_size):
            raise CheckpointLoadError(
                f"{index.where} was saved by {index.world_size} ranks with checkpoint/writer={index.format}, which "
                f"writes one file per rank, and there are {world_size} now; only checkpoints of checkpoint/writer=dcp "
                "load on another number of ranks."
            )
        rank = rank if index.world_size > 1 else 0
        source: Source = (
            TorchSaveSource(index, rank, access)
            if isinstance(index, OwnTorchSave)
            else RangeSource(index, index.of_rank(rank), access)
        )
        source.shared = not index.per_rank
        return source
    if isinstance(index, Megatron):
        return MegatronSource(index, access)
    if isinstance(index, StockDcp):
        return StockDcpSource(index, access)
    if isinstance(index, TorchFile):
        return TorchFileSource(index.storage, index.where, access)
    return RangeSource(index, index.contents, access)
