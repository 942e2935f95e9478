"""Folders of stock `dcp.save`: `.metadata` is their only index, and every stored chunk is a `torch.save` archive."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..image import objects as object_codec
from ..image.shards import overlap
from ..storage.fs import FsOps
from .foreign import list_paths
from .metadata import load_metadata
from .ranges import OpenFiles, in_parallel, read_full
from .source import Index, Request, Source, TensorEntry

_MAX_METADATA = 1 << 30


class StockDcpSource(Source):
    """A checkpoint of `torch.distributed.checkpoint`, from any world size; chunks are put together."""

    def __init__(self, fs: FsOps, folder: str) -> None:
        path = os.path.join(folder, ".metadata")
        try:
            data = fs.read(path, _MAX_METADATA)
        except OSError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error}.") from error
        self._metadata: Metadata = load_metadata(data, path)
        mapping = self._metadata.planner_data if isinstance(self._metadata.planner_data, dict) else {}
        paths, containers = list_paths(mapping)
        index = Index(containers=containers)
        for key, entry in self._metadata.state_dict_metadata.items():
            place = paths.get(key, (key,))
            if isinstance(entry, TensorStorageMetadata):
                index.tensors[key] = TensorEntry(place, entry.properties.dtype, entry.size, key)
            elif isinstance(entry, BytesStorageMetadata):
                index.objects[key] = place
        super().__init__(folder, index)

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Load the chunks of every tensor, and copy what each has of the parts that are asked for."""
        with OpenFiles(self.where) as files:
            work = []
            for request in requests:
                for chunk, common in self._chunks(request):
                    info = self._info(MetadataIndex(request.key, chunk.offsets))
                    files.descriptor(info.relative_path)
                    work.append((request, chunk, common, info))
            work.sort(key=lambda piece: (piece[3].relative_path, piece[3].offset))

            def read(piece: tuple[Request, Any, Any, _StorageInfo]) -> None:
                request, chunk, (theirs, ours, _), info = piece
                value = self._load(files, info, request.key)
                if not isinstance(value, torch.Tensor) or value.shape != chunk.sizes:
                    raise CheckpointCorruptError(f"'{request.key}' in {self.where} is not the chunk that was promised.")
                request.destination[ours].copy_(value[theirs])

            in_parallel(work, [info.length for *_, info in work], read)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Load the objects, each with `weights_only`."""
        with OpenFiles(self.where) as files:
            return {key: object_codec.decode(self._load(files, self._info(MetadataIndex(key)), key)) for key in keys}

    def _chunks(self, request: Request) -> list[tuple[Any, Any]]:
        """The chunks that have something of what is asked for, each with what they have in common."""
        entry = self._metadata.state_dict_metadata[request.key]
        pieces = [(chunk, overlap((chunk.offsets, chunk.sizes), request.box)) for chunk in getattr(entry, "chunks", ())]
        found = [(chunk, common) for chunk, common in pieces if common is not None]
        if sum(common[2] for _, common in found) != request.destination.numel():
            raise CheckpointCorruptError(f"The chunks of '{request.key}' in {self.where} do not cover the tensor.")
        return found

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info = self._metadata.storage_data.get(index)
        if not isinstance(info, _StorageInfo):
            raise CheckpointCorruptError(f"{self.where} does not say where '{index.fqn}' is stored.")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointLoadError(
                f"'{index.fqn}' in {self.where} was stored with the transforms {info.transform_descriptors}, which are "
                "not supported; load it with torch.distributed.checkpoint."
            )
        return info

    def _load(self, files: OpenFiles, info: _StorageInfo, key: str) -> Any:
        descriptor = files.descriptor(info.relative_path)
        size = os.fstat(descriptor).st_size
        if info.offset < 0 or info.length < 0 or info.offset + info.length > size:
            raise CheckpointCorruptError(
                f"'{key}' lies outside of {info.relative_path} ({size} bytes) in {self.where}."
            )
        data = bytearray(info.length)
        read_full(descriptor, [memoryview(data)], info.offset)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises nearly anything on damaged bytes
            raise CheckpointCorruptError(
                f"'{key}' in {os.path.join(self.where, info.relative_path)} cannot be loaded safely: {error}"
            ) from error
