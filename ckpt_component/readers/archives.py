"""Archives of `torch.save`, loaded with `weights_only` after their directory was looked at.

torch itself unpacks compressed members, however large they become; a writer never makes any.
"""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any

import torch

from ..errors import CheckpointCorruptError
from ..image import objects as object_codec

_ENCRYPTED = 1


def check_archive(stream: IO[bytes], size: int, where: str) -> None:
    """Refuse an archive whose members are compressed, encrypted, double, or larger than it is.

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


def load_object(data: bytearray | memoryview, where: str) -> Any:
    """The Python object that such an archive holds, decoded.

    Raises:
        CheckpointCorruptError: it is damaged, or holds what safe loading refuses.
    """
    return decode(load_archive(data, where), where)


def decode(value: Any, where: str) -> Any:
    """The object that was encoded as `value`; tagged values are as hostile as the file may be."""
    try:
        return object_codec.decode(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} holds a numpy value that makes no sense: {error}.") from error
