"""The checksums that items are stored with: `crc32` everywhere, by zlib or ten times faster by a package; and others.

The name of the algorithm stands beside the sums in every integrity file. The writer process runs without
site-packages, so the trainer sends it the path of the package to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

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
        package: what computes it.
        of: the checksum of one buffer.
        stream: begins one that is taken piece by piece.
        polynomial: of a CRC, without its highest power and with the lowest first; None: it is no CRC.
    """

    name: str
    package: str
    of: Callable[[memoryview], int]
    stream: Callable[[], Stream]
    polynomial: int | None = None


class ChecksumMissingError(ImportError):
    """The package of an algorithm is not installed; the text says which one to install."""


def find_checksum(name: str, home: Sequence[str] | None = None) -> Checksum:
    """The algorithm of this name, by the fastest package that is there.

    Args:
        name: one of `ALGORITHMS`.
        home: as of `home_of` in another process; None: look where this process imports from.

    Raises:
        ChecksumMissingError: its package is not installed.
        ValueError: there is no such algorithm.
    """
    if home is None:
        provider, module = _load(name)
    else:
        provider = next(each for each in PROVIDERS if (each.name, each.package) == (name, home[0]))
        module = _import_from(provider, home[1])
    return provider.make(provider, module)


def fastest() -> Checksum:
    """The fastest that can be used here."""
    provider, module = _load(None)
    return provider.make(provider, module)


def home_of(name: str) -> list[str] | None:
    """The package of an algorithm and the folder that it was found in; None where every Python has it.

    Raises:
        ChecksumMissingError: it is not installed.
    """
    provider, _ = _load(name)
    if provider.package == "zlib":
        return None
    (own, *_) = list(sys.modules[provider.package].__path__)
    return [provider.package, own.rpartition("/")[0]]


def install_text(name: str) -> str:
    """What to type so that an algorithm can be used."""
    return f"pip install {next(each.package for each in PROVIDERS if each.name == name)}"


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


def _crc32(provider: Provider, module: Any) -> Checksum:
    return _running(provider, module.crc32, 0xEDB88320)


def _crc32c(provider: Provider, module: Any) -> Checksum:
    return _running(provider, module.crc32c, 0x82F63B78)


def _crc32c_in_copies(provider: Provider, module: Any) -> Checksum:
    def update(piece: memoryview, value: int = 0) -> int:
        flat = piece.cast("B")
        for start in range(0, flat.nbytes, _COPIED):
            value = module.extend(value, bytes(flat[start : start + _COPIED]))
        return value

    return _running(provider, update, 0x82F63B78)


def _running(provider: Provider, update: Callable[..., int], polynomial: int) -> Checksum:
    return Checksum(provider.name, provider.package, update, lambda: _RunningStream(update), polynomial)


def _xxh3(provider: Provider, module: Any) -> Checksum:
    return Checksum(provider.name, provider.package, module.xxh3_64_intdigest, lambda: _HashStream(module.xxh3_64()))


class Provider(NamedTuple):
    """A package that has an algorithm, in one of its modules."""

    name: str  # of the algorithm
    package: str  # as pip knows it
    module: str
    make: Callable[[Provider, Any], Checksum]


#: The fastest first, as `auto` takes them: crc32 takes no time beside a read or a write with isal, and can be put
#: together from those of parts.
PROVIDERS = (
    Provider("crc32", "isal", "isal.isal_zlib", _crc32),
    Provider("xxh3_64", "xxhash", "xxhash", _xxh3),
    Provider("crc32c", "crc32c", "crc32c", _crc32c),
    Provider("crc32c", "google_crc32c", "google_crc32c", _crc32c_in_copies),
    Provider("crc32", "zlib", "zlib", _crc32),
)
ALGORITHMS = tuple(dict.fromkeys(provider.name for provider in PROVIDERS))


def _load(name: str | None) -> tuple[Provider, ModuleType]:
    """The first provider of an algorithm, or of any, whose module can be imported here and is of use."""
    if name is not None and name not in ALGORITHMS:
        raise ValueError(f"{name!r} is not a checksum algorithm; use one of {', '.join(ALGORITHMS)}.")
    for provider in PROVIDERS:
        if name not in (None, provider.name):
            continue
        try:
            module = import_module(provider.module)
        except ImportError:
            continue
        # Without its C part, google_crc32c is a thousand times slower than zlib.
        if getattr(module, "implementation", "c") != "python":
            return provider, module
    raise ChecksumMissingError(f"The checksum {name} needs a package that is not installed: {install_text(str(name))}.")


def _import_from(provider: Provider, folder: str) -> ModuleType:
    """Import one package from a folder that is not on the path; it is last there while the import goes on."""
    sys.path.append(folder)
    try:
        return import_module(provider.module)
    except ImportError as error:
        raise ChecksumMissingError(
            f"The package {provider.package} cannot be imported from {folder}, where the trainer found it: {error}."
        ) from error
    finally:
        sys.path.remove(folder)
