"""The text to train on, as bytes: a file, a folder, or the sources of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from ...config.errors import HydraConfigError

#: Folders of the standard library that are not part of it, or exist on some machines only.
_NOT_SOURCES = ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"]
_ADVICE = "give a file or a folder of text, or leave data.path out for Python's standard library"


@dataclass(frozen=True)
class Text:
    """Bytes to learn from.

    Attributes:
        train: uint8, one dimension.
        validation: uint8; the end of the text, never trained on. May be empty.
        source: where it came from, for people.
        fingerprint: a checksum of all of it, by which a resumed run knows its text.
    """

    train: torch.Tensor
    validation: torch.Tensor
    source: str
    fingerprint: int


def load_text(path: str | None, max_bytes: int, validation: float, context: int) -> Text:
    """Read the text and split it.

    The files of a folder are taken in the order of their names, hidden and binary ones left out, so the same
    folder gives the same text.

    Args:
        path: a file or a folder; None: the standard library's sources.
        max_bytes: how much to use.
        validation: the share kept from training, from 0 to 1.
        context: how many bytes the model sees at once.

    Raises:
        CheckpointConfigError: nothing is at the path, or nothing to read in it, or too little for one window.
    """
    if path is None:
        source, files = "Python's standard library", _files(sysconfig.get_paths()["stdlib"], ".py", _NOT_SOURCES)
    elif not os.path.exists(path):
        raise HydraConfigError(f"data.path={path} does not exist; {_ADVICE}.")
    else:
        source, files = path, _files(path, "") if os.path.isdir(path) else iter([path])
    data = _read(files, max_bytes)
    if not data:
        raise HydraConfigError(f"{_named(path)} has no text that could be read; {_ADVICE}.")
    # A window needs one byte more than it shows, the one to predict last.
    split = len(data) - int(len(data) * validation)
    if 0 < len(data) - split <= context:
        split = len(data) - context - 1
    if split <= context:
        raise HydraConfigError(
            f"{_named(path)} has {len(data)} bytes of text (data.max_bytes={max_bytes}), too few to train "
            f"and validate with model.context={context}; give more text."
        )
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return Text(tensor[:split], tensor[split:], source, zlib.crc32(data))


def _named(path: str | None) -> str:
    return "The standard library of this Python" if path is None else f"data.path={path}"


def _files(folder: str, ending: str, without: Collection[str] = ()) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        files = (os.path.join(parent, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.endswith(ending) and os.path.isfile(file))


def _read(files: Iterator[str], max_bytes: int) -> bytearray:
    data = bytearray()
    for path in files:
        if len(data) >= max_bytes:
            break
        try:
            with open(path, "rb") as file:
                start = file.read(8192)
                if b"\0" not in start:  # a file with a zero byte near its start is not text
                    data += start + file.read(max(max_bytes - len(data), 0))
        except OSError as error:
            raise HydraConfigError(f"The text in {path} cannot be read: {error.strerror}; {_ADVICE}.") from error
    return data[:max_bytes]
