"""Archives of `torch.save`: what is in one, read without running any of its code."""

from __future__ import annotations

import functools
import io
import math
import os
import reprlib
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import IO, Any, NamedTuple

from ..core.commit.names import CHECKSUMS
from ..core.storage.checksum import find_checksum
from ..core.storage.safe_open import place_of, read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..state.coverage import is_shape
from ..state.dtypes import WIDTHS
from ..state.paths import TAG, Path, key_of
from .index import Contents, Entry, Index, Listing
from .rank_index import StoredRange
from .safe_unpickle import Record, load_inert, record_class

#: The record of the pickled state in an archive.
DATA = "data.pkl"
_ENCRYPTED = 1
#: The claims of pickles up to this many bytes are cached.
_SMALL = 4096
_CHUNK = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22x2H")
#: Dtype of the elements, by the name of a storage class in a pickle; untyped ones count bytes.
STORAGE_DTYPES = {
    "UntypedStorage": "uint8",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "BoolStorage": "bool",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ShortStorage": "int16",
    "FloatStorage": "float32",
    "IntStorage": "int32",
    "QInt32Storage": "qint32",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def check_archive(stream: IO[bytes], size: int, where: str) -> None:
    """Refuse an archive with invalid members, see `members_of`, or with a pickle that claims more than is stored.

    Arguments and errors as for `members_of`.
    """
    members = members_of(stream, size, where)
    for name in members:
        if name.rpartition("/")[2] == DATA:
            pickled = stored_bytes(stream, members[name], where)
            try:
                claims = _cached_claims(pickled) if len(pickled) <= _SMALL else _claims(pickled)
            except Exception as error:  # a damaged pickle can raise nearly anything
                raise foreign_pickle(where, error) from error
            check_storages(claims, storage_prefix(name), members, where)


def members_of(stream: IO[bytes], size: int, where: str) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive by name; none is compressed, encrypted, duplicated, or of contradictory sizes.

    Args:
        stream: the archive, at any position
        size: size of the archive in bytes
        where: name of the archive for error texts

    Raises:
        CheckpointCorruptError: it is not a zip archive as `torch.save` writes it
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    # zipfile also passes on errors of struct, of the codecs and of a bad seek.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise CheckpointCorruptError(f"{where} is not a torch.save archive: {error}.") from error
    names: dict[str, zipfile.ZipInfo] = {}
    total = 0
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise CheckpointCorruptError(f"{where} has a compressed or encrypted member, {member.filename!r:.200}.")
        if member.file_size != member.compress_size or member.header_offset < 0:
            raise CheckpointCorruptError(f"{where} has the member {member.filename!r:.200} with two sizes.")
        if member.filename in names:
            raise CheckpointCorruptError(f"{where} has two members named {member.filename!r:.200}.")
        names[member.filename] = member
        total += member.file_size
        if member.header_offset + member.file_size > size or total > size:
            raise CheckpointCorruptError(
                f"{where} has {size} bytes, and its member {member.filename!r:.200} claims {member.file_size}."
            )
    return names


def storage_prefix(pickle_name: str) -> str:
    """What the names of storages begin with, given the name of the pickle in the same archive."""
    return f"{pickle_name.rpartition('/')[0]}/data/"


def verify_records(stream: IO[bytes], where: str) -> bool:
    """Compare every record with its CRC-32 in the directory, if the archive says that it has them.

    Args:
        stream: the archive, at any position; checked by `check_archive`
        where: name of the archive for error texts

    Returns:
        Whether it has them. torch may omit them.

    Raises:
        CheckpointCorruptError: a record is damaged
    """
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    if not any(member.filename.endswith(f"/{CHECKSUMS}") for member in members):
        return False
    checksum, buffer = find_checksum("crc32"), memoryview(bytearray(_CHUNK))
    for member in members:
        seek_to(stream, member, where)
        total, left = checksum.stream(), member.file_size
        while left and (count := stream.readinto(buffer[: min(left, _CHUNK)])):  # type: ignore[attr-defined]
            total.update(buffer[:count])
            left -= count
        if left or total.value() != member.CRC:
            raise CheckpointCorruptError(f"{where} is damaged: {member.filename!r:.200} does not match its checksum.")
    return True


def stored_bytes(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> bytes:
    """The bytes of a member. zipfile would verify a CRC that torch may have omitted."""
    seek_to(stream, member, where)
    data = stream.read(member.file_size)
    if len(data) != member.file_size:
        raise _misplaced(member, where)
    return data


def seek_to(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> None:
    """Set a stream to the first byte of a member."""
    stream.seek(member.header_offset)
    head = stream.read(_LOCAL_HEADER.size)
    magic, name, extra = _LOCAL_HEADER.unpack(head) if len(head) == _LOCAL_HEADER.size else (b"", 0, 0)
    if magic != b"PK\x03\x04":
        raise _misplaced(member, where)
    stream.seek(name + extra, io.SEEK_CUR)


def _misplaced(member: zipfile.ZipInfo, where: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{where} has no member {member.filename!r:.200} where its directory says.")


def check_storages(
    claims: Iterable[tuple[str, int]], prefix: str, members: Mapping[str, zipfile.ZipInfo], where: str
) -> None:
    """Check that every storage that a pickle refers to is stored in full."""
    for key, nbytes in claims:
        stored = members.get(prefix + key)
        if stored is None or nbytes > stored.file_size:
            raise CheckpointCorruptError(
                f"{where} claims a storage of {nbytes} bytes in {prefix + key:.200}, and "
                f"{'it has none' if stored is None else f'{stored.file_size} are stored'}."
            )


def foreign_pickle(where: str, error: Exception) -> CheckpointCorruptError:
    """The error for a pickle that `torch.save` does not write."""
    return CheckpointCorruptError(f"{where} has a pickle that torch.save does not write: {error}.")


def load_state(pickled: bytes, storage: Callable[[Sequence[Any]], Any]) -> Any:
    """Load the pickle of an archive, with `Record`s in place of tensors and all other objects.

    Args:
        pickled: the pickle
        storage: called with each reference to a storage; what it returns takes its place

    Raises:
        Exception: nearly any kind, if the pickle is damaged
    """
    classes: dict[str, type[Record]] = {}
    return load_inert(pickled, (), lambda module, name: classes.setdefault(name, record_class(name)), outside=storage)


def storage_of(reference: Any) -> tuple[str, str, int]:
    """Dtype, name and number of elements of a storage, from a reference to it in a pickle.

    Raises:
        ValueError: it is not a reference as `torch.save` writes it
    """
    what, kind, key, _, count = reference  # the fourth is the device
    dtype = STORAGE_DTYPES.get(getattr(kind, "kind", ""))
    if what != "storage" or dtype is None or type(key) is not str or type(count) is not int or count < 0:
        raise ValueError(f"it refers to a storage by {reprlib.repr(reference)}")
    return dtype, key, count


def _claims(pickled: bytes) -> tuple[tuple[str, int], ...]:
    """Names and sizes in bytes of the storages that a pickle refers to."""
    references: list[Any] = []
    load_state(pickled, references.append)
    return tuple((key, count * WIDTHS[dtype]) for dtype, key, count in map(storage_of, references))


#: In a folder of stock DCP every tensor has its own pickle, and pickles of tensors of one shape are identical.
_cached_claims = functools.lru_cache(maxsize=256)(_claims)


_WRAPPED = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_REBUILT = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")


class TorchFile(Index):
    """A file of `torch.save`, which another program wrote, or which is one file of ours.

    Args:
        found: what is at the path
    """

    format = "torch_save (file)"

    def __init__(self, found: Listing) -> None:
        folder, name = place_of(*os.path.split(found.weights))
        super().__init__(found, folder, [name])
        self.where = os.path.join(folder, name)

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """Every file of weights that no other format has."""
        return bool(found.weights)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """In the order of the pickle."""
        return torch_file_entries(self.storage, self.folder, *self.names)

    @cached_property
    def contents(self) -> Contents:
        """By the pickle."""
        return Contents.of(self.entries.values())


class _View(NamedTuple):
    """A tensor of a pickle: a view of a storage. Offset and strides count elements."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _StorageRecord(NamedTuple):
    dtype: str
    key: str


def torch_file_entries(fs: Storage, folder: str, name: str) -> dict[str, Entry]:
    """The entries of one file, by key.

    Tensors have the range of the file that is their storage; its `payload` is None for a tensor that is not contiguous
    there. All objects have the pickle as their range.

    Args:
        fs: the storage
        folder: the folder of the file
        name: the name of the file

    Raises:
        CheckpointCorruptError: it is not a regular file, is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it was saved by torch before 1.6, or does not contain a state dict
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

    def stored_range(member: zipfile.ZipInfo, payload: bool = False) -> StoredRange:
        seek_to(stream, member, path)
        start = stream.tell()
        checksum = (member.CRC, "crc32") if summed else (None, None)
        return StoredRange(name, start, member.file_size, start if payload else None, (), (), *checksum)

    whole = stored_range(members[pickle_name], payload=True)
    stream.seek(whole.offset)
    claims: dict[str, int] = {}

    def storage(reference: Sequence[Any]) -> _StorageRecord:
        dtype, key, count = storage_of(reference)
        claims[key] = max(count * WIDTHS[dtype], claims.get(key, 0))
        return _StorageRecord(dtype, key)

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
    ranges = {key: stored_range(members[prefix + key]) for key in claims}
    for place, value in flat:
        key = key_of(place)
        if value is None:
            yield key, Entry(key, place, "", (), 0, (whole,))
            continue
        width, stored = WIDTHS[value.dtype], ranges[value.storage]
        nbytes, start = math.prod(value.shape) * width, value.offset * width
        if not _is_contiguous(value):
            stored = stored._replace(view=(value.offset, *value.stride))
        elif start + nbytes > stored.length:
            raise CheckpointCorruptError(f"'{key}' in {path} has {nbytes} bytes at {start} of {stored.length}.")
        else:
            stored = stored._replace(payload=stored.offset + start)
        stored = stored._replace(offsets=(0,) * len(value.shape), shape=value.shape)
        yield key, Entry(key, place, value.dtype, value.shape, nbytes, (stored,))


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


def with_checksums(entries: Iterable[Entry], items: Sequence[StoredRange]) -> Iterator[Entry]:
    """Entries of a file whose items are checksummed elsewhere: each range becomes the item that contains it.

    Args:
        entries: the entries
        items: the items of the file, from its rank's index
    """
    items = sorted(items, key=lambda item: item.offset)
    starts = [item.offset for item in items]

    def summed(part: StoredRange) -> StoredRange:
        item = items[bisect_right(starts, part.offset) - 1] if starts else None
        if item is None or not item.offset <= part.offset <= part.offset + part.length <= item.offset + item.length:
            return part
        return item._replace(payload=part.payload, offsets=part.offsets, shape=part.shape, view=part.view)

    return (entry._replace(place=tuple(map(summed, entry.place))) for entry in entries)
