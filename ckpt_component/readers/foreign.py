"""Files that others made, by `torch.save` or safetensors.

They carry no checksums, so nothing is verified here; our own `torch_save` files are verified before they come here.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..image import objects as object_codec
from ..image.arena import tensor_bytes
from ..image.tree import Path, flatten, key_of
from ..writers.safetensors_format import DTYPES
from .ranges import OpenFiles, in_parallel, read_full
from .source import Index, Request, Source, TensorEntry

_MAX_HEADER = 100 << 20


class TorchFileSource(Source):
    """A file of `torch.save`, loaded with `weights_only`.

    Args:
        path: the file.
        mapped: map the file instead of reading it: for copying into a target.
    """

    def __init__(self, path: str, *, mapped: bool) -> None:
        state = _torch_load(path, mapped)
        if not isinstance(state, Mapping):
            raise CheckpointLoadError(
                f"{path} holds a {type(state).__name__}, not a state dict; use torch.load for it."
            )
        flat = flatten(state)
        self._tensors = {key_of(path): value for path, value in zip(flat.tensor_paths, flat.tensors, strict=True)}
        self._objects = {key_of(path): value for path, value in zip(flat.object_paths, flat.objects, strict=True)}
        self._mapped = mapped
        index = Index(containers=flat.containers)
        for place, tensor in zip(flat.tensor_paths, flat.tensors, strict=True):
            index.tensors[key_of(place)] = TensorEntry(place, tensor.dtype, tensor.shape, key_of(place))
        index.objects = {key_of(place): place for place in flat.object_paths}
        super().__init__(path, index)

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Copy from the loaded or mapped tensors."""
        for request in requests:
            request.destination.copy_(request.part_of(self._tensors[request.key]))

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode what stood beside the tensors."""
        return {key: object_codec.decode(self._objects[key]) for key in keys}

    def tied(self, key: str) -> torch.Tensor | None:
        """The loaded tensor itself, which shares its storage with those that were tied; not from a mapped file."""
        return None if self._mapped else self._tensors[key]


def _torch_load(path: str, mapped: bool) -> Any:
    try:
        # Only zip files can be mapped; torch.save wrote another form before 1.6.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointLoadError(
            f"{path} holds Python objects that safe loading refuses: {_first_line(error)} "
            "If you trust the file, load it with torch.load(weights_only=False) yourself."
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read as a torch.save file: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch puts the reason last, behind advice on how to switch the check off.
    named = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (named or lines or [type(error).__name__])[0]


class SafetensorsSource(Source):
    """A safetensors file of any origin."""

    def __init__(self, path: str) -> None:
        self._folder, self._name = os.path.split(os.path.abspath(path))
        size = os.path.getsize(path)
        with OpenFiles(self._folder) as files:
            header, self._start = _read_header(path, files.descriptor(self._name), size)
        self._places: dict[str, tuple[int, int]] = {}
        index = Index()
        known = {text: dtype for dtype, text in DTYPES.items()}
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = known.get(entry["dtype"]), torch.Size(entry["shape"])
            if dtype is None:
                raise CheckpointLoadError(f"'{key}' in {path} has the dtype {entry['dtype']}, which is not supported.")
            if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or self._start + end > size:
                raise CheckpointCorruptError(f"'{key}' in {path} has offsets that do not fit its shape or the file.")
            self._places[key] = (begin, end)
            index.tensors[key] = TensorEntry((key,), dtype, shape, key)
        for alias, kept in header.get("__metadata__", {}).items():
            if kept in index.tensors and alias not in index.tensors:
                found = index.tensors[kept]
                self._places[alias] = self._places[kept]
                index.tensors[alias] = TensorEntry((alias,), found.dtype, found.shape, found.same_as)
        super().__init__(path, index)

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Read in parallel, straight into contiguous CPU tensors."""
        with OpenFiles(self._folder) as files:
            fd = files.descriptor(self._name)
            ordered = sorted(requests, key=lambda request: self._places[request.key])

            def read(request: Request) -> None:
                begin, _ = self._places[request.key]
                landing = torch.empty(self.index.tensors[request.key].shape, dtype=request.destination.dtype)
                if not read_full(fd, [tensor_bytes(landing)], self._start + begin):
                    raise CheckpointCorruptError(f"{self.where} ends before '{request.key}'.")
                request.destination.copy_(request.part_of(landing))

            in_parallel(ordered, [self._places[r.key][1] - self._places[r.key][0] for r in ordered], read)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """There are none in this format."""
        return {}


def _read_header(path: str, fd: int, size: int) -> tuple[dict[str, Any], int]:
    length = memoryview(bytearray(8))
    if not read_full(fd, [length], 0):
        raise CheckpointCorruptError(f"{path} is too short for a safetensors file.")
    (count,) = struct.unpack("<Q", length)
    if count > min(_MAX_HEADER, size - 8):
        raise CheckpointCorruptError(f"{path} claims a header of {count} bytes and has {size} in all.")
    text = memoryview(bytearray(count))
    read_full(fd, [text], 8)
    try:
        header = json.loads(bytes(text))
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise CheckpointCorruptError(f"{path} has a header that is not JSON ({error}).") from error
    return header, 8 + count


def list_paths(mapping: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Path], list[tuple[Path, str]]]:
    """Paths and list containers from the flatten mapping of stock DCP (numbers are positions in lists)."""
    paths = {key: tuple(parts) for key, parts in mapping.items()}
    lists = {path[:depth] for path in paths.values() for depth, part in enumerate(path) if type(part) is int}
    return paths, [(path, "list") for path in lists]
