"""The checksums that items are stored with: `crc32` of zlib everywhere, faster ones where a package is installed.

The name of the algorithm stands beside the sums in every integrity file. The writer process runs without
site-packages, so it is told where the trainer found the package, and imports it from there.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

#: Algorithm -> the packages that have it, the best first. Fastest algorithm first, as `auto` takes them.
PACKAGES: dict[str, tuple[str, ...]] = {
    "xxh3_64": ("xxhash",),
    "crc32c": ("crc32c", "google_crc32c"),
    "crc32": (),
}
#: google_crc32c takes bytes alone, so that large buffers are copied in pieces of this size.
_COPIED = 256 << 10


class Stream(Protocol):
    """A checksum that is taken piece by piece."""

    def update(self, piece: memoryview) -> None:
        """Take the next bytes."""
        ...

    def value(self) -> int:
        """The checksum of all bytes so far."""
        ...


@dataclass(frozen=True, eq=False)  # its identity is hashed once for every tensor of a load
class Checksum:
    """One algorithm. Safe to use from several threads; a stream belongs to one.

    Attributes:
        name: as integrity files have it.
        of: the checksum of one buffer.
        stream: begins one that is taken piece by piece.
        polynomial: of a CRC, without its highest power and with the lowest first; None: it is no CRC.
    """

    name: str
    of: Callable[[memoryview], int]
    stream: Callable[[], Stream]
    polynomial: int | None = None


class ChecksumMissingError(ImportError):
    """The package of an algorithm is not installed; the text says which one to install."""


def find_checksum(name: str, home: Sequence[str] | None = None) -> Checksum:
    """The algorithm of this name.

    Args:
        name: a key of `PACKAGES`.
        home: as of `home_of` in another process; None: look where this process imports from.

    Raises:
        ChecksumMissingError: its package is not installed.
        ValueError: there is no such algorithm.
    """
    if name == "crc32":
        return _running(name, zlib.crc32, 0xEDB88320)
    package, module = _load(name) if home is None else (home[0], _import_from(*home))
    if package == "xxhash":
        return _hashing(name, module.xxh3_64_intdigest, module.xxh3_64)
    if package == "crc32c":
        return _running(name, module.crc32c, 0x82F63B78)
    return _running(name, lambda piece, value=0: _in_copies(module.extend, piece, value), 0x82F63B78)


def fastest() -> str:
    """The name of the fastest algorithm that can be used here."""
    for name in PACKAGES:
        try:
            find_checksum(name)
        except ChecksumMissingError:
            continue
        return name
    return "crc32"


def home_of(name: str) -> list[str] | None:
    """The package of an algorithm and the folder that it was found in; None where none is needed.

    Raises:
        ChecksumMissingError: it is not installed.
    """
    if not PACKAGES[name]:
        return None
    package, module = _load(name)
    (own, *_) = list(module.__path__)
    return [package, own.rpartition("/")[0]]


def install_text(name: str) -> str:
    """What to type so that an algorithm can be used."""
    return f"pip install {PACKAGES[name][0]}"


class _RunningStream:
    """A CRC: its value so far is all that it needs to go on."""

    def __init__(self, update: Callable[[memoryview, int], int]) -> None:
        self._update = update
        self._value = 0

    def update(self, piece: memoryview) -> None:
        self._value = self._update(piece, self._value)

    def value(self) -> int:
        return self._value


class _HashStream:
    """A hash object of xxhash."""

    def __init__(self, state: Any) -> None:
        self.update = state.update
        self.value = state.intdigest


def _running(name: str, update: Callable[..., int], polynomial: int) -> Checksum:
    return Checksum(name, update, lambda: _RunningStream(update), polynomial)


def _hashing(name: str, of: Callable[[memoryview], int], begin: Callable[[], Any]) -> Checksum:
    return Checksum(name, of, lambda: _HashStream(begin()))


def _in_copies(update: Callable[[int, bytes], int], piece: memoryview, value: int) -> int:
    flat = piece.cast("B")
    for start in range(0, flat.nbytes, _COPIED):
        value = update(value, bytes(flat[start : start + _COPIED]))
    return value


def _load(name: str) -> tuple[str, ModuleType]:
    """The first package of an algorithm that can be imported here."""
    from importlib import import_module

    if name not in PACKAGES:
        raise ValueError(f"{name!r} is no checksum algorithm; there are {', '.join(PACKAGES)}.")
    for package in PACKAGES[name]:
        try:
            module = import_module(package)
        except ImportError:
            continue
        # Without its C part, google_crc32c is a thousand times slower than zlib.
        if getattr(module, "implementation", "c") != "python":
            return package, module
    raise ChecksumMissingError(f"The checksum {name} needs a package that is not installed: {install_text(name)}.")


def _import_from(package: str, folder: str) -> ModuleType:
    """Import one package from a folder that is not on the path; it is last there while the import goes on."""
    from importlib import import_module

    if package in sys.modules:
        return sys.modules[package]
    sys.path.append(folder)
    try:
        return import_module(package)
    except ImportError as error:
        raise ChecksumMissingError(
            f"The package {package} cannot be imported from {folder}, where the trainer found it: {error}."
        ) from error
    finally:
        sys.path.remove(folder)
