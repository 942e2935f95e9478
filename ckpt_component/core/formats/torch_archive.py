"""Check `torch.save` archives: their zip directory, the sizes of their storages, and their checksums. Imports no torch.

torch itself unpacks compressed members of any size, and before 2.13 (seen in 2.7) it trusts a pickle that claims more
bytes for a storage than are stored, and reads foreign memory. No writer produces either.
"""

from __future__ import annotations

import functools
import io
import reprlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from ...errors import CheckpointCorruptError
from ...state.dtypes import WIDTHS
from ..commit.names import CHECKSUMS
from ..storage.checksum import find_checksum
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

    Args:
        stream: the archive, at any position
        size: size of the archive in bytes
        where: name of the archive for error texts

    Raises:
        CheckpointCorruptError: it is not a zip archive as `torch.save` writes it
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
