"""`.metadata` of stock DCP: unpickled without running code, then validated before anything is allocated from it."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..core.storage.safe_open import is_plain_name, read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..state.coverage import check_cover, is_shape
from ..state.dtypes import WIDTHS
from ..state.paths import Path
from .folder import MEGATRON_COMMON_FILE, MEGATRON_MARKER, METADATA
from .index import Contents, Entry, Index, Listing
from .rank_index import StoredRange
from .safe_unpickle import Record, load_inert
from .torch_archive import torch_file_entries

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


_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class StockDcp(Index):
    """A folder of `torch.distributed.checkpoint`. Every stored chunk is an archive, which says where its payload is.

    Args:
        found: what is at the path
    """

    format = "dcp (torch)"

    def __init__(self, found: Listing) -> None:
        super().__init__(found)
        ranks = {match[1] for match in map(_FILE.fullmatch, found.names) if match is not None}
        self.world_size = len(ranks) or None

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """By its metadata."""
        return METADATA in found.names

    @cached_property
    def sharded(self) -> Contents:
        """What `.metadata` lists."""
        return read_metadata(self.storage, self.folder)

    @property
    def contents(self) -> Contents:
        """What `.metadata` lists."""
        return self.sharded


class Megatron(StockDcp):
    """A folder of Megatron's `torch_dist` format: a checkpoint of DCP, and common values that all ranks have."""

    format = "megatron"

    def __init__(self, found: Listing) -> None:
        super().__init__(found)
        self.has_common_file = MEGATRON_COMMON_FILE in found.names

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """By what only Megatron writes beside the metadata."""
        return super().recognises(found) and MEGATRON_MARKER in found.names

    @cached_property
    def contents(self) -> Contents:
        """The sharded values, and below their own keys those of the common file."""
        if not self.has_common_file:
            return self.sharded
        common = torch_file_entries(self.storage, self.folder, MEGATRON_COMMON_FILE)
        entries = self.sharded.entries() | common
        return Contents.of(entries.values(), self.sharded.containers)


def read_metadata(fs: Storage, folder: str) -> Contents:
    """Read and validate the metadata of a DCP checkpoint.

    Args:
        fs: the storage
        folder: the folder of the checkpoint

    Returns:
        The contents, with a range for each stored chunk, which is an archive.

    Raises:
        CheckpointCorruptError: it is damaged, refers to other classes than those of DCP, or is invalid: a file name
            outside the folder, a location beyond the end of a file, chunks that overlap or leave a hole
        CheckpointLoadError: a form of storage is not supported
        CheckpointUnreadableError: it cannot be read
    """
    where = os.path.join(folder, METADATA)
    try:
        data = fs.read(where, _MAX_BYTES)
        sizes = {name: fs.size(os.path.join(folder, name)) for name in fs.names(folder)}
    except OSError as error:
        raise read_failure(where, error) from error
    try:
        record = load_inert(data, _RECORDS, lambda module, name: name if module == "torch" and name in WIDTHS else None)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointCorruptError(f"{where} is not a DCP metadata file that can be trusted: {error}.") from error
    files = {name: size for name, size in sizes.items() if size is not None}
    entries = _Checked(where, files).entries(record)
    # The flatten mapping of stock DCP has numbers for the positions in lists.
    paths = [entry.path for entry in entries]
    lists = {path[:depth] for path in paths for depth, part in enumerate(path) if type(part) is int}
    return Contents.of(entries, [(path, "list") for path in lists])


class _Checked:
    """Validates records and converts them to our own classes."""

    def __init__(self, where: str, sizes: Mapping[str, int]) -> None:
        self._where = where
        self._sizes = sizes

    def entries(self, record: Any) -> list[Entry]:
        """Convert the root record."""
        items, storage, planner = (
            self._attribute(record, self._kind(record) if self._kind(record) in _WHOLE else "Metadata", name)
            for name in ("state_dict_metadata", "storage_data", "planner_data")
        )
        if not isinstance(items, dict) or not isinstance(storage, dict):
            raise self._refused("it has no list of items")
        places, paths = self._places(storage), self._paths(planner, items)
        entries: list[Entry] = []
        for key, item in items.items():
            if type(key) is not str:
                raise self._refused(f"it has the key {reprlib.repr(key)}, which is no text")
            path = paths.get(key, (key,))
            if self._kind(item) == "BytesStorageMetadata":
                piece = self._stored(places, key, None)
                entries.append(Entry(key, path, "", (), piece.length, (piece._replace(payload=piece.offset),)))
            else:
                entries.append(self._tensor(key, path, item, places))
        return entries

    def _tensor(self, key: str, path: Path, entry: Any, places: Mapping[Any, StoredRange]) -> Entry:
        properties, size, chunks = (
            self._attribute(entry, "TensorStorageMetadata", name, key) for name in ("properties", "size", "chunks")
        )
        dtype = self._dtype(properties, key)
        shape = self._shape(size, key)
        if not isinstance(chunks, list):
            raise self._refused(f"'{key}' has no list of chunks")
        pieces: list[StoredRange] = []
        for chunk in chunks:
            offsets, sizes = (
                self._shape(self._attribute(chunk, "ChunkStorageMetadata", name, key), key)
                for name in ("offsets", "sizes")
            )
            place = self._stored(places, key, offsets)
            needed = math.prod(sizes) * WIDTHS[dtype]
            if needed > place.length:
                raise self._refused(
                    f"'{key}' has a chunk of {needed} bytes at {offsets}, and {place.file} has {place.length} for it"
                )
            pieces.append(place._replace(offsets=offsets, shape=sizes))
        check_cover(f"'{key}' in {self._where}", shape, [(piece.offsets, piece.shape) for piece in pieces])
        return Entry(key, path, dtype, shape, math.prod(shape) * WIDTHS[dtype], tuple(pieces))

    def _dtype(self, properties: Any, key: str) -> str:
        if self._kind(properties) != "TensorProperties":
            raise self._refused(f"'{key}' has no properties")
        # Its state is a tuple of dtype, layout, requires_grad, memory format and pinning.
        state = properties.state if isinstance(properties.state, tuple) else ()
        dtype, layout = state[:2] if len(state) >= 2 else (properties.get("dtype"), properties.get("layout"))
        if type(dtype) is not str or dtype not in WIDTHS:
            raise self._refused(f"'{key}' has the dtype {reprlib.repr(dtype)}")
        if layout is not None and not (self._kind(layout) == "_get_layout" and layout.args == ("torch.strided",)):
            raise CheckpointLoadError(f"'{key}' in {self._where} is not a dense tensor, which is not supported.")
        return dtype

    def _places(self, storage: Mapping[Any, Any]) -> dict[Any, StoredRange]:
        """Locations of all archives, by (key, offsets)."""
        places: dict[Any, StoredRange] = {}
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
            places[key, offsets] = StoredRange(name, offset, length, None)
        return places

    def _stored(self, places: Mapping[Any, StoredRange], key: str, offsets: tuple[int, ...] | None) -> StoredRange:
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
