"""Load `torch.save` archives with `weights_only`, after checking their zip directory and storage sizes.

torch itself unpacks compressed members of any size, and before 2.13 (seen in 2.7) it trusts a pickle that claims more
bytes for a storage than are stored, and reads foreign memory. No writer produces either.
"""

from __future__ import annotations

import functools
import io
import pickle
import reprlib
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from ...catalogue.safe_unpickle import Record, load_inert, record_class
from ...errors import CheckpointCorruptError, CheckpointLoadError
from ...image.torch_archive import CHECKSUMS
from ...state import objects as object_codec
from ...storage.checksum import find_checksum

_ENCRYPTED = 1
_DEFAULTDICT = "collections.defaultdict"
#: The claims of pickles up to this many bytes are cached.
_SMALL = 4096
_CHUNK = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22x2H")
#: Bytes of one element, by the name of a storage class in a pickle.
_ELEMENT_BYTES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QUInt8Storage", "QInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}


def check_archive(stream: IO[bytes], size: int, where: str) -> None:
    """Refuse an archive with members that are compressed, encrypted, duplicated, or of contradictory sizes.

    Args:
        stream: The archive, at any position.
        size: Size of the archive in bytes.
        where: Name of the archive for error texts.

    Raises:
        CheckpointCorruptError: It is not a zip archive as `torch.save` writes it.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    # zipfile also passes on errors of struct, of the codecs and of a bad seek.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise CheckpointCorruptError(f"{where} is not a torch.save archive: {error}.") from error
    names = set()
    total = 0
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise CheckpointCorruptError(f"{where} has a compressed or encrypted member, {member.filename!r:.200}.")
        if member.file_size != member.compress_size or member.header_offset < 0:
            raise CheckpointCorruptError(f"{where} has the member {member.filename!r:.200} with two sizes.")
        if member.filename in names:
            raise CheckpointCorruptError(f"{where} has two members named {member.filename!r:.200}.")
        names.add(member.filename)
        total += member.file_size
        if member.header_offset + member.file_size > size or total > size:
            raise CheckpointCorruptError(
                f"{where} has {size} bytes, and its member {member.filename!r:.200} claims {member.file_size}."
            )
    for member in members:
        prefix, _, name = member.filename.rpartition("/")
        if name == "data.pkl":
            sizes = {other.filename: other.file_size for other in members}
            _check_storages(_stored(stream, member, where), f"{prefix}/data/", sizes, where)


def verify_records(stream: IO[bytes], where: str) -> bool:
    """Compare every record with its CRC-32 in the directory, if the archive says that it has them.

    Args:
        stream: The archive, at any position; checked by `check_archive`.
        where: Name of the archive for error texts.

    Returns:
        Whether it has them. torch may omit them.

    Raises:
        CheckpointCorruptError: A record is damaged.
    """
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    if not any(member.filename.endswith(f"/{CHECKSUMS}") for member in members):
        return False
    checksum, buffer = find_checksum("crc32"), memoryview(bytearray(_CHUNK))
    for member in members:
        _seek(stream, member, where)
        total, left = checksum.stream(), member.file_size
        while left and (count := stream.readinto(buffer[: min(left, _CHUNK)])):  # type: ignore[attr-defined]
            total.update(buffer[:count])
            left -= count
        if left or total.value() != member.CRC:
            raise CheckpointCorruptError(f"{where} is damaged: {member.filename!r:.200} does not match its checksum.")
    return True


def _stored(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> bytes:
    """The bytes of a member. zipfile would verify a CRC that torch may have omitted."""
    _seek(stream, member, where)
    data = stream.read(member.file_size)
    if len(data) != member.file_size:
        raise _misplaced(member, where)
    return data


def _seek(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> None:
    """Set a stream to the first byte of a member."""
    stream.seek(member.header_offset)
    head = stream.read(_LOCAL_HEADER.size)
    magic, name, extra = _LOCAL_HEADER.unpack(head) if len(head) == _LOCAL_HEADER.size else (b"", 0, 0)
    if magic != b"PK\x03\x04":
        raise _misplaced(member, where)
    stream.seek(name + extra, io.SEEK_CUR)


def _misplaced(member: zipfile.ZipInfo, where: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{where} has no member {member.filename!r:.200} where its directory says.")


def _check_storages(pickled: bytes, prefix: str, sizes: Mapping[str, int], where: str) -> None:
    """Check that every storage that the pickle refers to is stored in full."""
    try:
        claims = _cached_claims(pickled) if len(pickled) <= _SMALL else _claims(pickled)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointCorruptError(f"{where} has a pickle that torch.save does not write: {error}.") from error
    for key, nbytes in claims:
        stored = sizes.get(prefix + key)
        if stored is None or nbytes > stored:
            raise CheckpointCorruptError(
                f"{where} claims a storage of {nbytes} bytes in {prefix + key:.200}, and "
                f"{'it has none' if stored is None else f'{stored} are stored'}."
            )


def _claims(pickled: bytes) -> tuple[tuple[str, int], ...]:
    """Names and sizes in bytes of the storages that a pickle refers to."""
    classes: dict[str, type[Record]] = {}
    references: list[Any] = []
    load_inert(
        pickled, (), lambda module, name: classes.setdefault(name, record_class(name)), outside=references.append
    )
    storages = []
    for reference in references:
        what, kind, key, _, count = reference  # the fourth is the device
        width = _ELEMENT_BYTES.get(getattr(kind, "kind", ""))
        if what != "storage" or width is None or type(key) is not str or type(count) is not int or count < 0:
            raise ValueError(f"it refers to a storage by {reprlib.repr(reference)}")
        storages.append((key, count * width))
    return tuple(storages)


#: In a folder of stock DCP every tensor has its own pickle, and pickles of tensors of one shape are identical.
_cached_claims = functools.lru_cache(maxsize=256)(_claims)


@dataclass(frozen=True)
class RefusedObject:
    """Stands for a value with objects that safe loading does not create; `kind` is the class of the first."""

    kind: str


def load_safely(source: str | IO[bytes], *, mmap: bool = False) -> Any:
    """Load a checked archive with `weights_only`; objects of classes that it refuses become inert `Record`s.

    Args:
        source: A path, or a stream at its beginning.
        mmap: Map the archive, given by its path, into memory.

    Raises:
        pickle.UnpicklingError: It calls a function of the operating system, or has something else that is no data.
        Exception: Nearly any other kind, on damaged bytes.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        _rewind(source)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    records: list[Any] = [(record_class(name), name) for name in names if name != _DEFAULTDICT]
    _rewind(source)
    # Within the context torch takes these classes, which do nothing, for the names in the file.
    with torch.serialization.safe_globals([*records, (_plain_dict, _DEFAULTDICT)]):
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
        CheckpointCorruptError: It is damaged, or contains objects that safe loading refuses.
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
        archives: The archives, by their name for error texts. Emptied on the way, to hold only one of them twice.

    Raises:
        CheckpointCorruptError: An archive is damaged, or contains objects that safe loading refuses.
        CheckpointLoadError: See `decode_all`.
    """
    return decode_all({where: load_archive(archives.pop(where), where) for where in list(archives)})


def decode_all(encoded: Mapping[str, Any]) -> list[Any]:
    """Decode objects from their encoded values, which come from an untrusted file.

    Args:
        encoded: The values, by their name for error texts.

    Returns:
        The objects, in their order; a `RefusedObject` for a value with objects that safe loading does not create.

    Raises:
        CheckpointCorruptError: An encoded numpy value is invalid.
        CheckpointLoadError: There is a numpy value, and numpy cannot be imported.
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
