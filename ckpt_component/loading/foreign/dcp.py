"""Folders of stock `dcp.save`: `.metadata` is the only index, and every stored chunk is a `torch.save` archive."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...core.formats.dcp_metadata import StockDcp
from ...core.formats.rank_index import StoredRange
from ...core.progress import Progress, no_progress
from ...core.storage.file_set import FileSet, RangeRead
from ...errors import CheckpointCorruptError
from ...state.coverage import overlap
from ..source import DTYPES, Access, Request, Source, copy_into
from .archives import load_archive, load_objects


class StockDcpSource(Source):
    """A checkpoint of `torch.distributed.checkpoint`, saved by any number of ranks.

    Args:
        index: the checkpoint
        access: how it is read

    Raises:
        CheckpointCorruptError: `.metadata` is damaged or contradicts the files
        CheckpointUnreadableError: `.metadata` cannot be read
    """

    def __init__(self, index: StockDcp, access: Access) -> None:
        self._open_files = access.open_files
        self.where, self.contents = index.where, index.sharded

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Load the chunks of every tensor, and copy their overlap with the requested parts."""
        with self._open_files(self.where) as files:

            def read(request: Request, place: StoredRange, common: Any) -> None:
                source, target, _ = common
                value = load_archive(self._bytes(files, place, request.key), self._name(request.key, place))
                expected = DTYPES.get(self.contents.tensors[request.key].dtype), torch.Size(place.shape)
                if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != expected:
                    raise CheckpointCorruptError(
                        f"{self._name(request.key, place)} is not the chunk that .metadata describes."
                    )
                copy_into(request.destination[target], value[source], request.key)

            files.read_all(
                [
                    RangeRead(place.file, place.offset, place.length, partial(read, request, place, common))
                    for request in requests
                    for place, common in self._chunks(request)
                ],
                progress,
                inside=torch.no_grad,  # leaf tensors may be filled
            )

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Load the objects, each with `weights_only`."""
        archives = {}
        with self._open_files(self.where) as files:
            for key in keys:
                (place,) = self.contents.objects[key].place
                archives[self._name(key, place)] = self._bytes(files, place, key)
        return dict(zip(keys, load_objects(archives), strict=True))

    def load(self, key: str) -> Any:
        """Load one object, with inert `Record`s in it for what safe loading refuses."""
        (place,) = self.contents.objects[key].place
        with self._open_files(self.where) as files:
            return load_archive(self._bytes(files, place, key), self._name(key, place))

    def _chunks(self, request: Request) -> list[tuple[StoredRange, Any]]:
        """The chunks that overlap the requested part, each with the overlap."""
        pieces = self.contents.tensors[request.key].place
        chunks = [(piece, overlap((piece.offsets, piece.shape), request.region)) for piece in pieces]
        return [(piece, common) for piece, common in chunks if common is not None]

    def _bytes(self, files: FileSet, place: StoredRange, key: str) -> memoryview:
        data = memoryview(bytearray(place.length))
        if not files.fill(place.file, data, place.offset):
            raise CheckpointCorruptError(f"{self._name(key, place)} is incomplete: the file is too short.")
        return data

    def _name(self, key: str, place: StoredRange) -> str:
        return f"'{key}' in {os.path.join(self.where, place.file)}"
