"""The text to train on, as bytes: a file, a folder, or the sources of Python's standard library."""

from __future__ import annotations

import logging
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...config.errors import HydraConfigError

logger = logging.getLogger(__name__)

#: Parts of the standard library's folder that are not it, or are there on some machines alone.
_NOT_SOURCES = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
}
#: A byte that no text has; a file with one near its start is no text.
_NUL = b"\0"


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
        folder = sysconfig.get_paths()["stdlib"]
        source, files = "Python's standard library", _files(folder, _NOT_SOURCES, ".py")
        advice = "give some text with data.path="
    else:
        source, advice = (
            path,
            "give a file or a folder of text, or leave data.path out for Python's standard library",
        )
        if not os.path.exists(path):
            raise HydraConfigError(f"data.path={path} does not exist; {advice}.")
        files = _files(path, set(), "") if os.path.isdir(path) else iter([path])
    data = _read(files, max_bytes)
    if not data:
        raise HydraConfigError(f"{_named(path)} has no text that could be read; {advice}.")
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


def _files(folder: str, without: set[str], ending: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(ending) and not name.startswith("."):
                yield os.path.join(parent, name)


def _read(files: Iterator[str], max_bytes: int) -> bytearray:
    data = bytearray()
    passed_over = []
    for name in files:
        if not os.path.isfile(name):  # a socket or a pipe would never end
            continue
        try:
            with open(name, "rb") as file:
                start = file.read(8192)
                if _NUL in start:
                    continue
                data += start
                data += file.read(max(max_bytes - len(data), 0))
        except OSError as error:
            passed_over.append(f"{name} ({error.strerror})")
        if len(data) >= max_bytes:
            break
    if passed_over:
        logger.warning("%d file(s) of text could not be read: %s", len(passed_over), ", ".join(passed_over[:3]))
    return data[:max_bytes]
