"""Archives of `torch.save`, loaded with `weights_only` after their directory was looked at.

torch itself unpacks compressed members, however large they become, and before 2.13 (seen in 2.7) it believes a pickle
that claims a larger storage than is stored, and reads other memory. No writer makes either.
"""

from __future__ import annotations

import functools
import io
import reprlib
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch

from ...errors import CheckpointCorruptError, CheckpointLoadError
from ...state import objects as object_codec
from .safe_unpickle import Record, load_inert, record_class

_ENCRYPTED = 1
#: Pickles of up to so many bytes are remembered.
_SMALL = 4096
_LOCAL_HEADER = struct.Struct("<4s22x2H")
#: Bytes of one element, by the class that a pickle names for a storage.
_ELEMENT_BYTES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QUInt8Storage", "QInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}


def check_archive(stream: IO[bytes], size: int, where: str) -> None:
    """Refuse an archive whose members are compressed, encrypted, double, or larger or smaller than is claimed.

    Args:
        stream: at any position.
        size: of the archive in bytes.
        where: for error texts.

    Raises:
        CheckpointCorruptError: it is no zip archive, or one that `torch.save` does not make.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    # Besides its own error, zipfile lets out what struct, the codecs and a bad seek raise.
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


def _stored(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> bytes:
    """The bytes of a member. Not by zipfile: it compares a CRC, which torch may have left out."""
    stream.seek(member.header_offset)
    head = stream.read(_LOCAL_HEADER.size)
    if len(head) == _LOCAL_HEADER.size:
        magic, name, extra = _LOCAL_HEADER.unpack(head)
        stream.seek(name + extra, io.SEEK_CUR)
        data = stream.read(member.file_size)
        if magic == b"PK\x03\x04" and len(data) == member.file_size:
            return data
    raise CheckpointCorruptError(f"{where} has no member {member.filename!r:.200} where its directory says.")


def _check_storages(pickled: bytes, prefix: str, sizes: Mapping[str, int], where: str) -> None:
    """Every storage that the pickle refers to must be stored in full."""
    try:
        claims = _claims_again(pickled) if len(pickled) <= _SMALL else _claims(pickled)
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
    """The storages that a pickle refers to: names and bytes."""
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


#: In a folder of stock DCP every tensor has a pickle of its own, and those of one shape are the same bytes.
_claims_again = functools.lru_cache(maxsize=256)(_claims)


def load_archive(data: bytearray | memoryview, where: str) -> Any:
    """What such an archive in memory holds.

    Raises:
        CheckpointCorruptError: it is damaged, or holds what safe loading refuses.
    """
    stream = io.BytesIO(data)
    check_archive(stream, len(data), where)
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise CheckpointCorruptError(f"{where} cannot be loaded safely: {error}") from error


def load_objects(archives: dict[str, memoryview]) -> list[Any]:
    """The Python objects that such archives hold, decoded, in their order.

    Args:
        archives: by what they are called in errors. They are taken out, so that no more than one is held twice.

    Raises:
        CheckpointCorruptError: one is damaged, or holds what safe loading refuses.
        CheckpointLoadError: see `decode_all`.
    """
    return decode_all({where: load_archive(archives.pop(where), where) for where in list(archives)})


def decode_all(encoded: Mapping[str, Any]) -> list[Any]:
    """The objects that were encoded as these values; tagged values are as hostile as the file may be.

    Args:
        encoded: by what they are called in errors.

    Raises:
        CheckpointCorruptError: a tagged value makes no sense.
        CheckpointLoadError: it is a numpy value, and there is no numpy here.
    """
    values = []
    for where, value in encoded.items():
        try:
            values.append(object_codec.decode(value))
        except ImportError as error:
            raise CheckpointLoadError(
                f"{where} holds a numpy value, and numpy cannot be imported here ({error}); install it, or load into a "
                "target without this key."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{where} holds a numpy value that makes no sense: {error}.") from error
    return values
