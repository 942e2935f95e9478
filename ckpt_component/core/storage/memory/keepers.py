"""`Keeper`: a process that keeps files in its memory, as who reads and writes them sees it.

`KeptFiles` is the keeper within its own process, `RemoteKeeper` from another one. Paths are whole, as `HostMemory` has
them: `host://runs/one@TOKEN/iter_0000200/manifest.json`.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from ...memory.huge_pages import map_sealed

logger = logging.getLogger("ckpt_component.storage")


class KeptFile(NamedTuple):
    """A file that a keeper has.

    Attributes:
        path: its path
        size: in bytes
        modified: when it was put, seconds since 1970
        home: the rank whose file it is, if it is a replica from another host
    """

    path: str
    size: int
    modified: float
    home: int | None = None


class Piece(ABC):
    """A file that is open, wherever its bytes are. Thread-safe.

    Attributes:
        is_replica: whether it is a copy of another rank's, which is not read while that rank's keeper has it
        is_here: whether its bytes are on this host
    """

    is_replica: bool = False
    is_here: ClassVar[bool] = True

    @property
    @abstractmethod
    def size(self) -> int:
        """In bytes."""

    @abstractmethod
    def fill(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with the file's bytes from an offset, which lie within its size; False: it is too short.

        Raises:
            OSError: they cannot be read
        """

    def view(self, offset: int, length: int) -> memoryview | None:
        """A range of the file without a copy, which the caller does not change; None: it is not mapped."""
        return None

    def forget(self, offset: int, length: int) -> None:
        """Have bytes come anew when they are read next, because those that came are damaged."""


@dataclass(frozen=True)
class LocalPiece(Piece):
    """A file on this host.

    Memory whose size is sealed can be viewed without a copy. What another process may truncate is read with `preadv`,
    which comes back short, where a mapping would raise SIGBUS.

    Attributes:
        descriptor: of memory or of a disk file, for reading
        base: where in it the file begins
        length: how many of its bytes are the file's
        tail: the bytes that follow them
        is_replica: see the base class
    """

    descriptor: int
    base: int
    length: int
    tail: bytes = b""
    is_replica: bool = False

    @property
    def size(self) -> int:
        return self.length + len(self.tail)

    def fill(self, buffer: memoryview, offset: int) -> bool:
        if offset + buffer.nbytes > self.length:
            of_memory = max(self.length - offset, 0)
            start = max(offset - self.length, 0)
            buffer[of_memory:] = memoryview(self.tail)[start : start + buffer.nbytes - of_memory]
            buffer = buffer[:of_memory]
        position = self.base + offset
        while buffer.nbytes:
            count = os.preadv(self.descriptor, [buffer], position)
            if count == 0:
                return False
            position += count
            buffer = buffer[count:]
        return True

    def view(self, offset: int, length: int) -> memoryview | None:
        begin, memory = self.base + offset, self._memory
        return None if memory is None or offset + length > self.length else memory[begin : begin + length]

    @cached_property
    def _memory(self) -> memoryview | None:
        """The memory of the descriptor, mapped; None: its size is not sealed, or there is no address space."""
        try:
            return map_sealed(self.descriptor, self.base + self.length)
        except OSError as error:
            logger.info("a snapshot in memory is read, not mapped: %s", error)
            return None


class Keeper(ABC):
    """One keeper. Thread-safe.

    All methods raise OSError: ConnectionError if the keeper is gone, and its files with it; TimeoutError if it does not
    answer.
    """

    @abstractmethod
    def listed(self, prefix: str) -> list[KeptFile]:
        """The file at a path and all files below it, in no order; "": all files."""

    @abstractmethod
    def get(self, path: str, limit: int) -> bytes:
        """The bytes of a file. Raises FileNotFoundError; EFBIG if they are more than `limit`."""

    @abstractmethod
    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        """Keep a small file; raises FileExistsError if it is to be `new` and is not, else it replaces what is there."""

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Delete those of these files that exist, in one step."""

    @abstractmethod
    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, Piece | bytes]]:
        """Open the files directly in a folder, by name, to read them within a context.

        Until it ends, their bytes stay as they are, whoever deletes the files. What is open is closed at its end.
        """

    def forget(self) -> None:
        """Free what reads have left, once nobody uses it any more."""


class ServedKeeper(Keeper):
    """A keeper within its own process, which serves others there; see `KeeperServer`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes of memory it takes."""

    @abstractmethod
    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, LocalPiece | bytes]]:
        """See the base class."""
