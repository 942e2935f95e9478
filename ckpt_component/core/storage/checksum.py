"""Checksum algorithms for stored items: `crc32` from zlib, and faster or other ones from optional packages.

Every integrity file names the algorithm of its checksums. The writer process runs without site-packages, so the
trainer sends it the path of the package to import.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

#: google_crc32c accepts only `bytes`, so large buffers are copied in pieces of this size.
_COPIED = 256 << 10


class Stream:
    """A checksum computed piece by piece. For a CRC the running value is the whole state."""

    def __init__(self, crc: Callable[[memoryview, int], int]) -> None:
        self._crc = crc
        self._value = 0

    def update(self, piece: memoryview) -> None:
        """Add the next bytes."""
        self._value = self._crc(piece, self._value)

    def value(self) -> int:
        """The checksum of all bytes so far."""
        return self._value


class _HashStream(Stream):
    """A stream over an xxhash object."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def update(self, piece: memoryview) -> None:
        self._state.update(piece)

    def value(self) -> int:
        return int(self._state.intdigest())


@dataclass(frozen=True, eq=False)  # its identity is hashed once for every tensor of a load
class Checksum:
    """One checksum algorithm. Thread-safe, except that each stream belongs to one thread.

    Attributes:
        name: as recorded in integrity files
        package: the package that computes it
        of: computes the checksum of one buffer
        stream: starts a checksum that is computed piece by piece
    """

    name: str
    package: str
    of: Callable[[memoryview], int]
    stream: Callable[[], Stream]


class ChecksumMissingError(ImportError):
    """The package of an algorithm is not installed; the message says which one to install."""


def find_checksum(name: str | None, folder: str | None = None) -> Checksum:
    """Return an algorithm by name, from the fastest installed package that has it.

    Args:
        name: one of `ALGORITHMS`; None: the fastest of all
        folder: an additional folder to import from, as returned by `home_of` in another process

    Raises:
        ChecksumMissingError: its package is not installed
        ValueError: there is no such algorithm
    """
    if name is not None and name not in ALGORITHMS:
        raise ValueError(f"{name!r} is not a checksum algorithm; use one of {', '.join(ALGORITHMS)}.")
    if folder is not None:
        sys.path.append(folder)  # last in the search order, and only during the import
    try:
        for provider in PROVIDERS:
            if name in (None, provider.name):
                with contextlib.suppress(ImportError):
                    module = import_module(provider.module)
                    # Without its C extension, google_crc32c is a thousand times slower than zlib.
                    if getattr(module, "implementation", "c") != "python":
                        return _checksum_by(provider, module)
    finally:
        if folder is not None:
            sys.path.remove(folder)
    where = "" if folder is None else f" in {folder}, where the trainer found it"
    raise ChecksumMissingError(
        f"The checksum {name} needs a package that is not installed{where}: {install_text(str(name))}."
    )


def fastest() -> Checksum:
    """The fastest installed algorithm."""
    return find_checksum(None)


def home_of(name: str) -> str | None:
    """The folder from which the package of an algorithm is imported; None for the standard library.

    Raises:
        ChecksumMissingError: it is not installed
    """
    package = find_checksum(name).package
    return None if package == "zlib" else os.path.dirname(next(iter(sys.modules[package].__path__)))


def install_text(name: str) -> str:
    """The pip command that installs an algorithm's package."""
    return f"pip install {next(each.package for each in PROVIDERS if each.name == name)}"


class Provider(NamedTuple):
    """A module that implements an algorithm, and the package that installs it."""

    name: str  # of the algorithm
    package: str  # the name for pip
    module: str


#: Fastest first, the order in which `auto` tries them. With isal, crc32 costs nothing measurable next to the I/O.
PROVIDERS = (
    Provider("crc32", "isal", "isal.isal_zlib"),
    Provider("xxh3_64", "xxhash", "xxhash"),
    Provider("crc32c", "crc32c", "crc32c"),
    Provider("crc32c", "google_crc32c", "google_crc32c"),
    Provider("crc32", "zlib", "zlib"),
)
ALGORITHMS = tuple(dict.fromkeys(provider.name for provider in PROVIDERS))


def _checksum_by(provider: Provider, module: Any) -> Checksum:
    """The algorithm as implemented by this package."""
    name, package, _ = provider
    if name == "xxh3_64":
        return Checksum(name, package, module.xxh3_64_intdigest, lambda: _HashStream(module.xxh3_64()))
    crc = partial(_crc32c_in_copies, module) if package == "google_crc32c" else getattr(module, name)
    return Checksum(name, package, crc, partial(Stream, crc))


def _crc32c_in_copies(module: Any, piece: memoryview, value: int = 0) -> int:
    flat = piece.cast("B")
    for start in range(0, flat.nbytes, _COPIED):
        value = module.extend(value, bytes(flat[start : start + _COPIED]))
    return value
