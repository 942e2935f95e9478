"""`Keeper`: a process that keeps files in its memory, as who reads and writes them sees it.

`KeptFiles` is the keeper within its own process, `RemoteKeeper` from another one. Paths are whole, as `HostMemory` has
them: `host://runs/one@TOKEN/iter_0000200/manifest.json`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple


class KeptFile(NamedTuple):
    """A file that a keeper has.

    Attributes:
        path: its path
        size: in bytes
        modified: when it was put, seconds since 1970
    """

    path: str
    size: int
    modified: float


class Piece(NamedTuple):
    """Where the bytes of a file are.

    Attributes:
        descriptor: of memory or of a disk file, for reading
        base: where in it the file begins
        size: how many of its bytes are the file's
        tail: the bytes that follow them
    """

    descriptor: int
    base: int
    size: int
    tail: bytes = b""


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

        Until it ends, their bytes stay as they are, whoever deletes the files. The descriptors are closed at its end.
        """
