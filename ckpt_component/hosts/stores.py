"""What a snapshot server serves: a `SnapshotStore` of sealed files, and the files that are open for reading.

Paths are whole, as `HostMemory` has them: `host://runs/one@TOKEN/iter_0000200/manifest.json`. `MemoryStore` has the
files of this process: small ones as bytes, those of a snapshot as ranges of its image. The image is held by a
descriptor of the memory that the trainer has staged into; nothing is copied. Beside the files of the own rank there are
replicas: files of ranks on other hosts, under the paths that they have at home. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from ..core.outside import OUTSIDE, Outside
from ..core.pages import map_sealed
from ..core.storage.safe_open import open_to_read

logger = logging.getLogger("ckpt_component.storage")


class ListedFile(NamedTuple):
    """A file that a server has.

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


@dataclass(frozen=True, kw_only=True)
class ReadableFile(ABC):
    """A file that is open, wherever its bytes are: an image, and the bytes that follow it. Thread-safe.

    Attributes:
        length: bytes of the image; 0: it is a small file
        tail: the bytes that follow
        is_replica: whether it is a copy of another rank's, which is not read while that rank's server has it
        identity: see `ImageRange`
        is_here: whether its bytes are on this host
    """

    length: int = 0
    tail: bytes = b""
    is_replica: bool = False
    identity: str = ""
    is_here: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """In bytes."""
        return self.length + len(self.tail)

    def fill(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with the file's bytes from an offset, which lie within its size; False: it is too short.

        Raises:
            OSError: they cannot be read
        """
        of_image, start = max(min(self.length - offset, buffer.nbytes), 0), max(offset - self.length, 0)
        buffer[of_image:] = memoryview(self.tail)[start : start + buffer.nbytes - of_image]
        return not of_image or self.fill_image(buffer[:of_image], offset)

    @abstractmethod
    def fill_image(self, buffer: memoryview, offset: int) -> bool:
        """See `fill`; of the image alone."""

    def view(self, offset: int, length: int) -> memoryview | None:
        """A range of the file without a copy, which the caller does not change; None: it is not mapped."""
        return None

    def forget(self, offset: int, length: int) -> None:
        """Have bytes come again when they are read next, because those that came are damaged."""


@dataclass(frozen=True, kw_only=True)
class LocalFile(ReadableFile):
    """A file on this host.

    Memory whose size is sealed can be viewed without a copy. What another process may truncate is read with `preadv`,
    which comes back short, where a mapping would raise SIGBUS.

    Attributes:
        descriptor: of memory or of a disk file, for reading; -1: it has no image
        base: where in it the image begins
    """

    descriptor: int = -1
    base: int = 0

    def fill_image(self, buffer: memoryview, offset: int) -> bool:
        position = self.base + offset
        while buffer.nbytes and (count := os.preadv(self.descriptor, [buffer], position)):
            position, buffer = position + count, buffer[count:]
        return not buffer.nbytes

    def view(self, offset: int, length: int) -> memoryview | None:
        begin, memory = self.base + offset, self._memory if offset + length <= self.length else None
        return None if memory is None else memory[begin : begin + length]

    def cut(self, path: str) -> OSError:
        """The error of memory that ends before the file at a path does."""
        there = max(os.fstat(self.descriptor).st_size - self.base, 0)
        return OSError(errno.EIO, f"its memory ends after {there} of {self.length} bytes", path)

    @cached_property
    def _memory(self) -> memoryview | None:
        """The memory of the descriptor, mapped; None: its size is not sealed, or there is no address space."""
        try:
            return map_sealed(self.descriptor, self.base + self.length)
        except OSError as error:
            logger.info("a snapshot in memory is read, not mapped: %s", error)
            return None


class SnapshotStore(ABC):
    """One server. Thread-safe.

    All methods raise OSError: ConnectionError if the server is gone, and its files with it; TimeoutError if it does not
    answer.
    """

    @abstractmethod
    def listed(self, prefix: str) -> list[ListedFile]:
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
    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, ReadableFile]]:
        """Open the files directly in a folder, by name, to read them within a context.

        Until it ends, their bytes stay as they are, whoever deletes the files. What is open is closed at its end.
        """

    def forget(self) -> None:
        """Free what reads have left, once nobody uses it any more."""


class _HeldImage:
    """An open image, or an open file on disk; closed with this object, or before by `close`.

    Args:
        descriptor: of it

    Attributes:
        descriptor: our own, for reading alone, which all readers have

    Raises:
        OSError: there is no free descriptor
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = open_to_read(descriptor)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.close.atexit = False


class ImageRange(NamedTuple):
    """Where a file is: a range of a source, and the bytes that follow it.

    Attributes:
        tail: the bytes that follow
        source: number of the source; None: there is no range
        base: where in it the range begins
        length: its bytes
        identity: two ranges with the same one, of one server, are the same bytes of the same file on disk; "": it is in
            an arena, which is filled again. That of a replica is from the server of its home.
        modified: when it was put, seconds since 1970
        home: the rank whose replica it is; None: it is of the own rank
    """

    tail: bytes = b""
    source: int | None = None
    base: int = 0
    length: int = 0
    identity: str = ""
    modified: float = 0.0
    home: int | None = None

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        return self.length + len(self.tail)

    def opened(self, images: Mapping[int, _HeldImage]) -> LocalFile:
        """Open it, given its source."""
        if self.source is None:
            return LocalFile(tail=self.tail)
        is_replica, fd = self.home is not None, images[self.source].descriptor
        tail, _, base, length, identity, *_ = self
        return LocalFile(length=length, tail=tail, is_replica=is_replica, identity=identity, descriptor=fd, base=base)


class MemoryStore(SnapshotStore):
    """See the top of this file. A source is open while it has files or readers.

    Args:
        outside: of this process
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._lock = outside.lock()
        self._token = outside.random_bytes(8).hex()
        #: Arenas have numbers from 0 on.
        self._numbers = itertools.count(-1, -1)
        self._files: dict[str, ImageRange] = {}
        #: The sources by number, and those of files on disk by inode: one that is closed may be another file's.
        self._images: dict[int, _HeldImage] = {}
        self._on_disk: dict[tuple[int, int], int] = {}
        #: How many readers each source has.
        self._readers = Counter[int]()

    def listed(self, prefix: str) -> list[ListedFile]:
        with self._lock:
            return [
                ListedFile(path, file.size, file.modified, file.home)
                for path, file in self._files.items()
                if not prefix or path == prefix or path.startswith(f"{prefix}/")
            ]

    def get(self, path: str, limit: int) -> bytes:
        with self._lock:
            if path not in self._files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            held = self._files[path]
            if held.size > limit:
                raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
            data, file = bytearray(held.size), held.opened(self._images)
            if not file.fill(memoryview(data), 0):
                raise file.cut(path)
            return bytes(data)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        with self._lock:
            if new:
                self._refuse_taken(path)
            self._drop([path])
            self._files[path] = ImageRange(data, modified=self._outside.date())

    def new_source(self) -> int:
        """A number for a source that is not an arena."""
        return next(self._numbers)

    def put_image(self, path: str, source: int, descriptor: int, base: int, size: int, tail: bytes = b"") -> None:
        """Keep a file that is a range of memory, or of an open file on disk, which must not change until it is deleted.

        Args:
            path: where there is no file yet
            source: a number for the memory; what has the same number has the same descriptor. Files on disk that are
                one file become one source.
            descriptor: of the memory; opened once more with the source's first file, and closed with its last one
            base: where in the memory the file begins
            size: how many bytes of the memory are the file's
            tail: the bytes that follow them, such as those of objects, whose length changes from save to save

        Raises:
            FileExistsError: there is a file
            OSError: there is no free descriptor
        """
        with self._lock:
            self._refuse_taken(path)
            file, identity = ImageRange(tail, modified=self._outside.date()), ""
            if size and source < 0:  # a file on disk
                status = os.fstat(descriptor)
                source = self._on_disk.setdefault((status.st_dev, status.st_ino), source)
                identity = f"{self._token}:{source}:{base}:{size}"
            if size:  # else the arena is not read for it
                if source not in self._images:
                    self._images[source] = _HeldImage(descriptor)
                file = file._replace(source=source, base=base, length=size, identity=identity)
            self._files[path] = file

    def put_replica(
        self, home: int, folder: str, files: Mapping[str, ImageRange], image: tuple[int, int] | None = None
    ) -> None:
        """Keep files of another rank, in one step, in the place of all that are there from this rank.

        Args:
            home: the rank
            folder: all files are below it
            files: what they are at home; those that the own rank has stay as they are
            image: number and descriptor of a new source; it is opened once more

        Raises:
            OSError: there is no free descriptor; all is as it was
        """
        with self._lock:
            if image is not None:
                self._images[image[0]] = _HeldImage(image[1])
            for path in [path for path, file in self._files.items() if file.home == home]:
                if path.startswith(f"{folder}/"):
                    del self._files[path]
            for path, file in files.items():
                self._files.setdefault(path, file._replace(home=home))
            self._close_unused()

    def delete(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._drop(paths)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalFile]]:
        with self._lock:
            found = {path: file for path, file in self._files.items() if os.path.dirname(path) == folder}
            files = {os.path.basename(path): file.opened(self._images) for path, file in found.items()}
            reading = self._reading(found.values())
        with reading:
            yield files

    @contextlib.contextmanager
    def linked(self, home: int, wanted: Mapping[str, tuple[int, str]]) -> Iterator[dict[str, ImageRange]]:
        """Find replicas whose bytes are those of files that a home has now, and hold them within a context.

        A file with the same path is of the same attempt, so its bytes are the same.

        Args:
            home: the rank
            wanted: by path, the length without the tail, and the identity

        Returns:
            By path, where its bytes are; without those that are not here.
        """
        with self._lock:
            ranges = {path: file for path, file in self._files.items() if file.home == home}
            same = {file.identity: file for file in ranges.values() if file.identity}
            nearest = {path: ranges.get(path) or same.get(identity) for path, (_, identity) in wanted.items()}
            found = {path: file for path, file in nearest.items() if file and file.length == wanted[path][0]}
            reading = self._reading(found.values())
        with reading:
            yield found

    def has_source(self, number: int) -> bool:
        """Whether a source has files or readers."""
        with self._lock:
            return number in self._images

    def held(self) -> set[int]:
        """The sources that a reader has open now."""
        with self._lock:
            return {*self._readers}

    @property
    def nbytes(self) -> int:
        """Bytes of all files, which take memory."""
        with self._lock:
            return sum(file.size for file in self._files.values())

    def _refuse_taken(self, path: str) -> None:
        if path in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _drop(self, paths: Sequence[str]) -> None:
        if any([self._files.pop(path, None) for path in paths]):
            self._close_unused()

    def _close_unused(self) -> None:
        """Close the sources that have neither files nor readers. The caller has the lock."""
        used = {*self._readers} | _sources_of(self._files.values())
        for number in self._images.keys() - used:
            self._images.pop(number).close()
        self._on_disk = {inode: number for inode, number in self._on_disk.items() if number in used}

    def _reading(self, files: Iterable[ImageRange]) -> ExitStack:
        """A reader has entered files, whose sources it leaves at the end of this. The caller has the lock."""
        sources, reading = _sources_of(files), ExitStack()
        self._readers.update(sources)
        reading.callback(self._leave, sources)
        return reading

    def _leave(self, sources: Collection[int]) -> None:
        with self._lock:
            self._readers -= Counter(sources)
            self._close_unused()


def _sources_of(files: Iterable[ImageRange]) -> set[int]:
    return {file.source for file in files if file.source is not None}
