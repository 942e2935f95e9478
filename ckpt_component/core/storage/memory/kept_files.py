"""`KeptFiles`: the files that this process keeps: small ones as bytes, those of a snapshot as ranges of its image.

The image is held by a descriptor of the memory that the trainer has staged into; nothing is copied.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from ...clock import CLOCK, Clock
from ..safe_open import open_to_read
from .keepers import Keeper, KeptFile, LocalPiece


class _ImageRange(NamedTuple):
    """A range of a source, and the bytes that follow it in the file."""

    source: int
    base: int
    size: int
    tail: bytes


@dataclass
class _HeldImage:
    """An open image, or an open file on disk.

    Attributes:
        descriptor: our own
        files: how many files are in it
        readers: how many readers have it open
    """

    descriptor: int
    files: int = 0
    readers: int = 0


class KeptFiles(Keeper):
    """See the top of this file.

    Args:
        clock: dates the files
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Arenas have numbers from 0 on.
        self._numbers = itertools.count(-1, -1)
        self._files: dict[str, tuple[_ImageRange | bytes, float]] = {}
        self._sources: dict[int, _HeldImage] = {}

    def listed(self, prefix: str) -> list[KeptFile]:
        with self._lock:
            return [
                KeptFile(path, _size(content), modified)
                for path, (content, modified) in self._files.items()
                if not prefix or path == prefix or path.startswith(f"{prefix}/")
            ]

    def get(self, path: str, limit: int) -> bytes:
        with self._lock:
            content, _ = self._files.get(path, (None, 0.0))
            if content is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if _size(content) > limit:
                raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
            if isinstance(content, bytes):
                return content
            with self._opened({content.source}) as sources:
                return _read(sources[content.source], content, path)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        with self._lock:
            if new:
                self._refuse_taken(path)
            self._drop([path])
            self._files[path] = data, self._clock.date()

    def new_source(self) -> int:
        """A number for a source that is no arena."""
        return next(self._numbers)

    def put_image(self, path: str, source: int, descriptor: int, base: int, size: int, tail: bytes = b"") -> None:
        """Keep a file that is a range of memory, or of an open file on disk, which must not change until it is deleted.

        Args:
            path: where there is no file yet
            source: a number for the memory; what has the same number has the same descriptor
            descriptor: of the memory; duplicated with the source's first file, and closed with its last one
            base: where in the memory the file begins
            size: how many bytes of the memory are the file's
            tail: the bytes that follow them, such as those of objects, whose length changes from save to save

        Raises:
            FileExistsError: there is a file
            OSError: there is no free descriptor
        """
        with self._lock:
            self._refuse_taken(path)
            if source not in self._sources:
                self._sources[source] = _HeldImage(os.dup(descriptor))
            self._sources[source].files += 1
            self._files[path] = _ImageRange(source, base, size, tail), self._clock.date()

    def delete(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._drop(paths)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalPiece | bytes]]:
        with ExitStack() as until_closed:
            with self._lock:
                found = {
                    os.path.basename(path): content
                    for path, (content, _) in self._files.items()
                    if os.path.dirname(path) == folder
                }
                sources = {content.source for content in found.values() if not isinstance(content, bytes)}
                for source in sources:
                    self._sources[source].readers += 1
            until_closed.callback(self._leave, sources)
            with self._opened(sources) as descriptors:
                yield {
                    name: content
                    if isinstance(content, bytes)
                    else LocalPiece(descriptors[content.source], content.base, content.size, content.tail)
                    for name, content in found.items()
                }

    def held(self) -> set[int]:
        """The sources that a reader has open now."""
        with self._lock:
            return {number for number, source in self._sources.items() if source.readers}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(_size(content) for content, _ in self._files.values())

    def _refuse_taken(self, path: str) -> None:
        if path in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _drop(self, paths: Sequence[str]) -> None:
        for path in paths:
            content, _ = self._files.pop(path, (b"", 0.0))
            if not isinstance(content, bytes):
                self._sources[content.source].files -= 1
                self._close_unused(content.source)

    def _leave(self, sources: Collection[int]) -> None:
        with self._lock:
            for number in sources:
                self._sources[number].readers -= 1
                self._close_unused(number)

    def _close_unused(self, number: int) -> None:
        source = self._sources[number]
        if not (source.files or source.readers):
            os.close(self._sources.pop(number).descriptor)

    @contextlib.contextmanager
    def _opened(self, sources: Collection[int]) -> Iterator[dict[int, int]]:
        """Open sources, which stay, for reading alone: their descriptors by number."""
        with ExitStack() as until_closed:
            descriptors = dict[int, int]()
            for number in sources:
                descriptors[number] = open_to_read(self._sources[number].descriptor)
                until_closed.callback(os.close, descriptors[number])
            yield descriptors


def _size(content: _ImageRange | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.size + len(content.tail)


def _read(descriptor: int, place: _ImageRange, path: str) -> bytes:
    data = bytearray()
    while len(data) < place.size:
        part = os.pread(descriptor, place.size - len(data), place.base + len(data))
        if not part:
            raise OSError(errno.EIO, f"its memory ends after {len(data)} of {place.size} bytes", path)
        data += part
    return bytes(data) + place.tail
