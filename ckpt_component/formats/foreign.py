"""Safe readers of what other programs wrote: archives, stock DCP folders, Megatron's, files of `torch.save`."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch

from ..core.progress import Progress, no_progress
from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.locate import is_url
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointStageError
from ..state import objects as object_codec
from ..state.coverage import overlap
from ..state.flatten import flatten
from ..state.paths import key_of
from .dcp_metadata import Megatron, StockDcp
from .folder import MEGATRON_COMMON_FILE, MEGATRON_COMMON_KEY
from .index import Contents, Entry
from .rank_index import StoredRange
from .safe_unpickle import Record, record_class
from .source import DTYPE_NAMES, DTYPES, Access, Request, Source, copy_into
from .torch_archive import check_archive, verify_records

_DEFAULTDICT = "collections.defaultdict"


@dataclass(frozen=True)
class RefusedObject:
    """Stands for a value with objects that safe loading does not create; `kind` is the class of the first."""

    kind: str


def load_safely(source: str | IO[bytes], *, mmap: bool = False) -> Any:
    """Load a checked archive with `weights_only`; objects of classes that it refuses become inert `Record`s.

    Args:
        source: a path, or a stream at its beginning
        mmap: map the archive, given by its path, into memory

    Raises:
        pickle.UnpicklingError: it calls a function of the operating system, or has something else that is no data
        Exception: nearly any other kind, on damaged bytes
    """
    try:
        with torch.inference_mode(False):  # what is loaded in that mode may be trained outside of it
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        _rewind(source)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    records: list[Any] = [(record_class(name), name) for name in names if name != _DEFAULTDICT]
    _rewind(source)
    # Within the context torch takes these classes, which do nothing, for the names in the file.
    with torch.serialization.safe_globals([*records, (_plain_dict, _DEFAULTDICT)]), torch.inference_mode(False):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _rewind(source: str | IO[bytes]) -> None:
    if not isinstance(source, str):
        source.seek(0)


def _plain_dict(*_: Any) -> dict[Any, Any]:
    """Stands for the constructor of a defaultdict."""
    return {}


def refused_kind(value: Any) -> str | None:
    """The class of the first `Record` in a value, an object that safe loading did not create; None without one."""
    if isinstance(value, Record):
        return value.kind
    if isinstance(value, type):
        return value.kind if issubclass(value, Record) else None
    parts = value if type(value) in (list, tuple, set) else ()
    if type(value) in (dict, OrderedDict):
        parts = [*value, *value.values()]
    return next(filter(None, map(refused_kind, parts)), None)


def load_archive(data: bytearray | memoryview, where: str) -> Any:
    """Load an archive in memory.

    Raises:
        CheckpointCorruptError: it is damaged, or contains objects that safe loading refuses
    """
    stream = io.BytesIO(data)
    check_archive(stream, len(data), where)
    stream.seek(0)
    try:
        return load_safely(stream)
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise CheckpointCorruptError(f"{where} cannot be loaded safely: {error}") from error


def load_objects(archives: dict[str, memoryview]) -> list[Any]:
    """Load and decode the Python objects in archives, in their order.

    Args:
        archives: the archives, by their name for error texts. Emptied on the way, to hold only one of them twice.

    Raises:
        CheckpointCorruptError: an archive is damaged, or contains objects that safe loading refuses
        CheckpointLoadError: see `decode_all`
    """
    return decode_all({where: load_archive(archives.pop(where), where) for where in list(archives)})


def decode_all(encoded: Mapping[str, Any]) -> list[Any]:
    """Decode objects from their encoded values, which come from an untrusted file.

    Args:
        encoded: the values, by their name for error texts

    Returns:
        The objects, in their order; a `RefusedObject` for a value with objects that safe loading does not create.

    Raises:
        CheckpointCorruptError: an encoded numpy value is invalid
        CheckpointLoadError: there is a numpy value, and numpy cannot be imported
    """
    values = []
    for where, value in encoded.items():
        try:
            kind = refused_kind(value)
            values.append(object_codec.decode(value) if kind is None else RefusedObject(kind))
        except ImportError as error:
            raise CheckpointLoadError(
                f"{where} holds a numpy value, and numpy cannot be imported here ({error}); install it, or load into a "
                "target without this key."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{where} holds an invalid numpy value: {error}.") from error
    return values


#: A tensor may be larger than its file if it repeats stored elements (`expand`), up to this many bytes.
_MOST_REPEATED = 64 << 20


class StateSource(Source):
    """A state dict that is loaded already.

    Args:
        state: the state dict
        where: where it comes from, for messages
        mapped: its tensors are mapped from a file, so they can only be copied from

    Raises:
        CheckpointLoadError: it is not a state dict of plain data
    """

    def __init__(self, state: Any, where: str, *, mapped: bool = False) -> None:
        kind = refused_kind(state) if not isinstance(state, Mapping) else None
        if kind is not None:
            raise CheckpointLoadError(
                f"{where} holds a {kind}, which safe loading refuses. If you trust the file, load it with "
                "torch.load(weights_only=False) yourself."
            )
        if not isinstance(state, Mapping):
            raise CheckpointLoadError(
                f"{where} holds a {type(state).__name__}, not a state dict; use torch.load for it."
            )
        try:
            flat = flatten(state)
        except (CheckpointStageError, RecursionError) as error:
            raise CheckpointLoadError(f"{where} does not hold a valid state dict: {error}") from error
        self.tensors = {key_of(path): value for path, value in zip(flat.tensor_paths, flat.tensors, strict=True)}
        self._objects = {key_of(path): value for path, value in zip(flat.object_paths, flat.objects, strict=True)}
        self._mapped = mapped
        entries = [Entry(key_of(path), path, "", (), 0, ()) for path in flat.object_paths]
        for path, (key, tensor) in zip(flat.tensor_paths, self.tensors.items(), strict=True):
            # Tied tensors have the same memory.
            memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else key
            entries.append(Entry(key, path, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, memory))
        self.where, self.contents = where, Contents.of(entries, flat.containers)

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Copy from the loaded or mapped tensors."""
        total = sum(request.destination.nbytes for request in requests)
        with progress(f"reading {os.path.basename(self.where)}", total) as advance:
            for request in requests:
                copy_into(request.destination, request.part_of(self.tensors[request.key]), request.key)
                advance(request.destination.nbytes)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the Python objects."""
        return dict(
            zip(keys, decode_all({f"'{key}' in {self.where}": self._objects[key] for key in keys}), strict=True)
        )

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """The loaded tensors themselves, which share storages with tied ones; copies of those of a mapped file."""
        return super().new_tensors(keys, progress) if self._mapped else {key: self.tensors[key] for key in keys}


class TorchFileSource(StateSource):
    """A file of `torch.save` of another program, or a single file of ours, loaded with `weights_only`.

    Args:
        fs: the storage
        path: the file
        access: `mapped`: map the file into memory instead of reading it; objects of a bucket are always read

    Raises:
        CheckpointCorruptError: it is not a regular file, is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it does not contain a state dict of plain data
    """

    def __init__(self, fs: Storage, path: str, access: Access) -> None:
        folder, name = os.path.split(path)
        mapped = access.mapped and not is_url(path)
        with fs.open_files(folder) as files, files.stream(name) as stream:
            size = files.size(name)
            state = load_stream(stream, size, path, mapped=mapped, verify=access.verify)
        super().__init__(state, path, mapped=mapped)
        for key, tensor in self.tensors.items():
            if tensor.nbytes > max(size, _MOST_REPEATED):
                raise CheckpointCorruptError(
                    f"'{key}' in {path} has the shape {tuple(tensor.shape)}, which is {tensor.nbytes} bytes, and the "
                    f"file has {size}."
                )


def verify_torch_file(fs: Storage, path: str) -> bool:
    """Compare the checksums in a file of `torch.save`. Returns False if it has none.

    Raises:
        CheckpointCorruptError: it is not a regular file, or is damaged
        CheckpointUnreadableError: it cannot be read
    """
    folder, name = os.path.split(path)
    try:
        with fs.open_files(folder) as files, files.stream(name) as stream:
            if not zipfile.is_zipfile(stream):
                return False
            check_archive(stream, files.size(name), path)
            return verify_records(stream, path)
    except OSError as error:
        raise read_failure(path, error) from error


def load_stream(stream: Any, size: int, path: str, *, mapped: bool = False, verify: bool = False) -> Any:
    """Load a file of `torch.save`, with `weights_only`.

    Args:
        stream: the file, at its beginning; readable and seekable
        size: bytes of the file
        path: the file, for messages
        mapped: map it into memory, if it is a zip archive
        verify: compare the checksums in it, if it has them

    Raises:
        CheckpointCorruptError: it is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it has objects that safe loading refuses
    """
    try:
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        zipped = zipfile.is_zipfile(stream)
        if zipped:
            check_archive(stream, size, path)
            if verify:
                verify_records(stream, path)
        stream.seek(0)
        if not zipped:
            with torch.inference_mode(False):  # as in `load_safely`
                return torch.load(stream, map_location="cpu", weights_only=True)
        # Mapping needs a path; this one leads to the file just checked, even if `path` is replaced after that.
        return load_safely(f"/proc/self/fd/{stream.fileno()}" if mapped else stream, mmap=mapped)
    except CheckpointCorruptError:
        raise
    except pickle.UnpicklingError as error:
        stream.seek(0)
        if not zipped and stream.read(1) != pickle.PROTO:  # which begins every pickle of torch
            raise CheckpointLoadError(f"{path} is not a file of torch.save.") from error
        raise CheckpointLoadError(
            f"{path} holds Python objects that safe loading refuses: {_first_line(error)} "
            "If you trust the file, load it with torch.load(weights_only=False) yourself."
        ) from error
    except OSError as error:
        raise read_failure(path, error) from error
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise CheckpointCorruptError(
            f"{path} cannot be read as a torch.save file ({type(error).__name__}: {_first_line(error)})."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch puts the reason last, after advice on how to disable the check.
    reasons = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (reasons or lines or [type(error).__name__])[0]


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


#: The end of the key of a ShardedObject: its offsets, and how many there are, in each dimension.
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")


class MegatronSource(StockDcpSource):
    """The sharded values under Megatron's keys, and beside them the common values as a nested dict.

    Args:
        index: the checkpoint
        access: how it is read

    Raises:
        CheckpointCorruptError: a file is damaged, or the two parts have a key in common
        CheckpointUnreadableError: a file cannot be read
        CheckpointLoadError: the common values are not a dict
    """

    def __init__(self, index: Megatron, access: Access) -> None:
        super().__init__(index, access)
        self._common = common = self._open_common(index)
        sharded = index.sharded
        entries = {key: entry for key, entry in sharded.entries().items() if key != MEGATRON_COMMON_KEY}
        for key, entry in common.contents.entries().items():
            if key in entries:
                raise CheckpointCorruptError(f"'{key}' is stored twice, in {self.where} and in {common.where}.")
            entries[key] = entry
        self.contents = Contents.of(entries.values(), sharded.containers + common.contents.containers)

    def _open_common(self, index: Megatron) -> StateSource:
        if MEGATRON_COMMON_KEY in index.sharded.objects:
            value = _data(MEGATRON_COMMON_KEY, self.load(MEGATRON_COMMON_KEY))
            return StateSource(value, f"'{MEGATRON_COMMON_KEY}' in {self.where}")
        if index.has_common_file:
            path = os.path.join(index.folder, MEGATRON_COMMON_FILE)
            return TorchFileSource(index.storage, path, Access(index.storage.open_files, verify=False))
        return StateSource({}, self.where)

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read both parts."""
        groups: tuple[list[Request], list[Request]] = [], []
        for request in requests:
            groups[request.key in self._common.contents.tensors].append(request)
        super().read_tensors(groups[False], progress)
        self._common.read_tensors(groups[True], progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Load the objects of both parts."""
        common = [key for key in keys if key in self._common.contents.objects]
        sharded = super().read_objects([key for key in keys if key not in self._common.contents.objects])
        return {**{key: _data(key, value) for key, value in sharded.items()}, **self._common.read_objects(common)}


def _data(key: str, value: Any) -> Any:
    """The data of a ShardedObject, which Megatron stores as a list of one."""
    if _SHARD.search(key) and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value
