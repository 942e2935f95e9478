"""`.metadata` of stock DCP: unpickled without running code, then validated before anything is allocated from it."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..state.boxes import Box
from ..state.dtypes import WIDTHS
from ..state.paths import Path
from ..storage.fs import FsOps
from ..storage.safe_open import is_plain_name, read_failure
from .safe_unpickle import Record, load_inert
from .shapes import check_cover, is_shape

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_TENSORS = ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
#: Names of classes, by module.
_CLASSES: Mapping[str, Sequence[str]] = {
    f"{_DCP}.metadata": ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", *_TENSORS),
    # Megatron and NVRx store every rank's plan there, for their next save.
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    f"{_DCP}.filesystem": ("_StoragePrefix", "_StorageInfo"),
    f"{_MEGATRON}.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch.serialization": ("_get_layout",),
    # Python 3.11.0 to 3.11.3 pickles a member of an enumeration as a getattr call on its class. Here it is an inert
    # record as all others.
    "builtins": ("getattr",),
    # DCP stores the checkpoint's path as an object, of a class that depends on the Python version.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
_RECORDS = [(module, name) for module, names in _CLASSES.items() for name in names]

_MAX_BYTES = 1 << 30
_WHOLE = ("Metadata", "MCoreMetadata")


@dataclass(frozen=True)
class StoredAt:
    """The location of an archive: file, offset and length in bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StockTensor:
    """One tensor: dtype, shape, size in bytes, and its chunks with their locations."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: tuple[tuple[Box, StoredAt], ...]


@dataclass(frozen=True)
class StockMetadata:
    """The validated contents of a `.metadata` file.

    Attributes:
        tensors: Tensors by key.
        objects: Locations of the objects' archives, by key.
        paths: Paths of values by key, as far as the planner recorded them.
    """

    tensors: Mapping[str, StockTensor]
    objects: Mapping[str, StoredAt]
    paths: Mapping[str, Path]


def read_metadata(fs: FsOps, folder: str, widths: Mapping[str, int] = WIDTHS) -> StockMetadata:
    """Read and validate the metadata of a DCP checkpoint.

    Args:
        fs: The file system.
        folder: The folder of the checkpoint.
        widths: Bytes of one element of the supported dtypes, by name.

    Raises:
        CheckpointCorruptError, CheckpointLoadError: See `load_metadata`.
        CheckpointUnreadableError: It cannot be read.
    """
    path = os.path.join(folder, ".metadata")
    try:
        data = fs.read(path, _MAX_BYTES)
        sizes = {name: fs.size(os.path.join(folder, name)) for name in fs.names(folder)}
    except OSError as error:
        raise read_failure(path, error) from error
    return load_metadata(data, path, {name: size for name, size in sizes.items() if size is not None}, widths)


def load_metadata(
    data: bytes, where: str, sizes: Mapping[str, int], widths: Mapping[str, int] = WIDTHS
) -> StockMetadata:
    """Load and validate the metadata of a DCP checkpoint.

    Args:
        data: Bytes of the file.
        where: Path of the file, for error texts.
        sizes: Sizes of the regular files in the same folder, by name.
        widths: Bytes of one element of the supported dtypes, by name.

    Raises:
        CheckpointCorruptError: It is damaged, refers to other classes than those of DCP, or is invalid: a file name
            outside the folder, a location beyond the end of a file, chunks that overlap or leave a hole.
        CheckpointLoadError: A form of storage is not supported.
    """
    try:
        record = load_inert(data, _RECORDS, lambda module, name: name if module == "torch" and name in widths else None)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointCorruptError(f"{where} is not a DCP metadata file that can be trusted: {error}.") from error
    return _Checked(where, sizes, widths).metadata(record)


def list_paths(mapping: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Path], list[tuple[Path, str]]]:
    """Paths and list containers from the flatten mapping of stock DCP (numbers are positions in lists)."""
    paths = {key: tuple(parts) for key, parts in mapping.items()}
    lists = {path[:depth] for path in paths.values() for depth, part in enumerate(path) if type(part) is int}
    return paths, [(path, "list") for path in lists]


class _Checked:
    """Validates records and converts them to our own classes."""

    def __init__(self, where: str, sizes: Mapping[str, int], widths: Mapping[str, int]) -> None:
        self._where = where
        self._sizes = sizes
        self._widths = widths

    def metadata(self, record: Any) -> StockMetadata:
        """Convert the root record."""
        entries, storage, planner = (
            self._attribute(record, self._kind(record) if self._kind(record) in _WHOLE else "Metadata", name)
            for name in ("state_dict_metadata", "storage_data", "planner_data")
        )
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise self._refused("it has no list of items")
        places = self._places(storage)
        tensors: dict[str, StockTensor] = {}
        objects: dict[str, StoredAt] = {}
        for key, entry in entries.items():
            if type(key) is not str:
                raise self._refused(f"it has the key {reprlib.repr(key)}, which is no text")
            if self._kind(entry) == "BytesStorageMetadata":
                objects[key] = self._stored(places, key, None)
            else:
                tensors[key] = self._tensor(key, entry, places)
        return StockMetadata(tensors, objects, self._paths(planner, entries))

    def _tensor(self, key: str, entry: Any, places: Mapping[Any, StoredAt]) -> StockTensor:
        properties, size, chunks = (
            self._attribute(entry, "TensorStorageMetadata", name, key) for name in ("properties", "size", "chunks")
        )
        dtype = self._dtype(properties, key)
        shape = self._shape(size, key)
        if not isinstance(chunks, list):
            raise self._refused(f"'{key}' has no list of chunks")
        stored: list[tuple[Box, StoredAt]] = []
        for chunk in chunks:
            offsets, sizes = (
                self._shape(self._attribute(chunk, "ChunkStorageMetadata", name, key), key)
                for name in ("offsets", "sizes")
            )
            place = self._stored(places, key, offsets)
            needed = math.prod(sizes) * self._widths[dtype]
            if needed > place.length:
                raise self._refused(
                    f"'{key}' has a chunk of {needed} bytes at {offsets}, and {place.file} has {place.length} for it"
                )
            stored.append(((offsets, sizes), place))
        check_cover(f"'{key}' in {self._where}", shape, [box for box, _ in stored])
        return StockTensor(dtype, shape, math.prod(shape) * self._widths[dtype], tuple(stored))

    def _dtype(self, properties: Any, key: str) -> str:
        if self._kind(properties) != "TensorProperties":
            raise self._refused(f"'{key}' has no properties")
        # Its state is a tuple of dtype, layout, requires_grad, memory format and pinning.
        state = properties.state if isinstance(properties.state, tuple) else ()
        dtype, layout = state[:2] if len(state) >= 2 else (properties.get("dtype"), properties.get("layout"))
        if type(dtype) is not str or dtype not in self._widths:
            raise self._refused(f"'{key}' has the dtype {reprlib.repr(dtype)}")
        if layout is not None and not (self._kind(layout) == "_get_layout" and layout.args == ("torch.strided",)):
            raise CheckpointLoadError(f"'{key}' in {self._where} is not a dense tensor, which is not supported.")
        return dtype

    def _places(self, storage: Mapping[Any, Any]) -> dict[Any, StoredAt]:
        """Locations of all archives, by (key, offsets)."""
        places: dict[Any, StoredAt] = {}
        for index, info in storage.items():
            key, offsets = self._attribute(index, "MetadataIndex", "fqn"), index.get("offset")
            if type(key) is not str:
                raise self._refused(f"it stores the key {reprlib.repr(key)}, which is no text")
            if offsets is not None:
                offsets = self._shape(offsets, key)
            name, offset, length = (
                self._attribute(info, "_StorageInfo", part, key) for part in ("relative_path", "offset", "length")
            )
            if info.get("transform_descriptors"):
                raise CheckpointLoadError(
                    f"'{key}' in {self._where} was stored with transforms, which are not supported; load it with "
                    "torch.distributed.checkpoint."
                )
            if not is_plain_name(name):
                raise self._refused(f"'{key}' is in the file {reprlib.repr(name)}, which is not a plain name")
            if name not in self._sizes:
                raise self._refused(f"'{key}' is in {name}, and there is no such regular file")
            if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
                raise self._refused(f"'{key}' is at {reprlib.repr(offset)} of {name} with {reprlib.repr(length)} bytes")
            if offset + length > self._sizes[name]:
                raise self._refused(
                    f"'{key}' is beyond the end of {name}: {length} bytes at {offset} of {self._sizes[name]}"
                )
            if (key, offsets) in places:
                raise self._refused(f"'{key}' is stored twice at {offsets}")
            places[key, offsets] = StoredAt(name, offset, length)
        return places

    def _stored(self, places: Mapping[Any, StoredAt], key: str, offsets: tuple[int, ...] | None) -> StoredAt:
        place = places.get((key, offsets))
        if place is None:
            at = "" if offsets is None else f" at {offsets}"
            raise self._refused(f"it does not say where '{key}'{at} is stored")
        return place

    def _paths(self, planner: Any, entries: Mapping[str, Any]) -> dict[str, Path]:
        """The paths that the planner recorded; other planners store other data there, which is ignored."""
        if not isinstance(planner, dict):
            return {}
        return {
            key: path
            for key, path in planner.items()
            if type(key) is str
            and key in entries
            and type(path) is tuple
            and path
            and all(type(part) in (str, int) for part in path)
        }

    def _shape(self, value: Any, key: str) -> tuple[int, ...]:
        if type(value) is not tuple or not is_shape(value):
            raise self._refused(f"'{key}' has the shape or place {reprlib.repr(value)}")
        return value

    def _attribute(self, record: Any, kind: str, name: str, key: str | None = None) -> Any:
        if self._kind(record) != kind:
            of = "" if key is None else f" for '{key}'"
            raise self._refused(f"it has a {self._kind(record) or type(record).__name__} where a {kind} belongs{of}")
        return record.get(name)

    @staticmethod
    def _kind(value: Any) -> str:
        return value.kind if isinstance(value, Record) else ""

    def _refused(self, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self._where} is not a DCP metadata file that can be trusted: {what}.")
