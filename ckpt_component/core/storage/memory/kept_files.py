"""`KeptFiles`: the files that this process keeps: small ones as bytes, those of a snapshot as ranges of its image.

The image is held by a descriptor of the memory that the trainer has staged into; nothing is copied. Beside the files of
the own rank there are replicas: files of ranks on other hosts, under the paths that they have at home.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ...outside import OUTSIDE, Outside
from .file_sums import FileSums
from .held_images import HeldImages
from .keepers import KeptFile, LocalPiece, ServedKeeper


class ImageRange(NamedTuple):
    """A range of a source, and the bytes that follow it in the file.

    Attributes:
        source: number of the source
        base: where in it the file begins
        length: how many of its bytes are the file's
        tail: the bytes that follow them
        sums: of the range, if they are known
    """

    source: int
    base: int
    length: int
    tail: bytes = b""
    sums: FileSums | None = None


class OpenImage(NamedTuple):
    """A file of an image, to be copied to a peer.

    Attributes:
        piece: for reading
        sums: of its bytes without the tail, if they are known
        same: other files of this keeper that are the same bytes of the same file on disk
    """

    piece: LocalPiece
    sums: FileSums | None
    same: list[str]


class _KeptEntry(NamedTuple):
    """A file: its bytes or where they are, when it was put, and whose replica it is; None: it is of the own rank."""

    content: ImageRange | bytes
    modified: float
    home: int | None = None


class KeptFiles(ServedKeeper):
    """See the top of this file.

    Args:
        outside: of this process
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._lock = outside.lock()
        #: Arenas have numbers from 0 on.
        self._numbers = itertools.count(-1, -1)
        self._files: dict[str, _KeptEntry] = {}
        self._sources = HeldImages()

    def listed(self, prefix: str) -> list[KeptFile]:
        with self._lock:
            return [
                KeptFile(path, _size(entry.content), entry.modified, entry.home)
                for path, entry in self._files.items()
                if not prefix or path == prefix or path.startswith(f"{prefix}/")
            ]

    def get(self, path: str, limit: int) -> bytes:
        with self._lock:
            if path not in self._files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            content = self._files[path].content
            if _size(content) > limit:
                raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
            if isinstance(content, bytes):
                return content
            with self._sources.opened({content.source}) as sources:
                return _read(sources[content.source], content, path)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        with self._lock:
            if new:
                self._refuse_taken(path)
            self._drop([path])
            self._files[path] = _KeptEntry(data, self._outside.date())

    def new_source(self) -> int:
        """A number for a source that is no arena."""
        return next(self._numbers)

    def put_image(
        self,
        path: str,
        source: int,
        descriptor: int,
        base: int,
        size: int,
        tail: bytes = b"",
        sums: FileSums | None = None,
    ) -> None:
        """Keep a file that is a range of memory, or of an open file on disk, which must not change until it is deleted.

        Args:
            path: where there is no file yet
            source: a number for the memory; what has the same number has the same descriptor
            descriptor: of the memory; duplicated with the source's first file, and closed with its last one
            base: where in the memory the file begins
            size: how many bytes of the memory are the file's
            tail: the bytes that follow them, such as those of objects, whose length changes from save to save
            sums: checksums of the range, for those who copy it

        Raises:
            FileExistsError: there is a file
            OSError: there is no free descriptor
        """
        with self._lock:
            self._refuse_taken(path)
            if source not in self._sources:
                self._sources.hold(source, descriptor)
            self._add(path, _KeptEntry(ImageRange(source, base, size, tail, sums), self._outside.date()))

    def put_replica(
        self,
        home: int,
        folder: str,
        files: Mapping[str, tuple[ImageRange | bytes, float]],
        image: tuple[int, int] | None = None,
    ) -> None:
        """Keep files of another rank, in one step, in the place of all that are there from this rank.

        Args:
            home: the rank
            folder: all files are below it
            files: what they are, and when they were put at home; those that the own rank has stay as they are
            image: number and descriptor of a new source; the descriptor is duplicated

        Raises:
            OSError: there is no free descriptor; all is as it was
        """
        with self._lock:
            if image is not None:
                self._sources.hold(*image)
            older = [
                (path, entry.content)
                for path, entry in self._files.items()
                if entry.home == home and path.startswith(f"{folder}/")
            ]
            for path, _ in older:
                del self._files[path]
            for path, (content, modified) in files.items():
                if path not in self._files:
                    self._add(path, _KeptEntry(content, modified, home))
            for _, content in older:  # now, as a source may be of use again
                self._let_go(content)
            if image is not None:
                self._sources.close_unused(image[0])

    def delete(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._drop(paths)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalPiece | bytes]]:
        with self._opened_where(lambda path, entry: os.path.dirname(path) == folder) as (entries, descriptors):
            yield {os.path.basename(path): _open_content(entry, descriptors) for path, entry in entries.items()}

    @contextlib.contextmanager
    def opened_to_copy(self, folder: str) -> Iterator[Mapping[str, tuple[OpenImage | bytes, float]]]:
        """Open the own rank's files below a folder, at any depth, within a context.

        Returns:
            By path, what they are, and when they were put.
        """

        def is_own(path: str, entry: _KeptEntry) -> bool:
            return entry.home is None and path.startswith(f"{folder}/")

        with self._opened_where(is_own) as (entries, descriptors):
            with self._lock:
                others = dict[tuple[object, ...], list[str]]()
                for path, entry in self._files.items():
                    place = self._place_on_disk(entry.content)
                    if place is not None and entry.home is None and path not in entries:
                        others.setdefault(place, []).append(path)
                same = {
                    path: others.get(self._place_on_disk(entry.content) or (), []) for path, entry in entries.items()
                }
            found = dict[str, tuple[OpenImage | bytes, float]]()
            for path, entry in entries.items():
                content = _open_content(entry, descriptors)
                if isinstance(content, bytes):
                    found[path] = content, entry.modified
                elif content.length == 0:
                    found[path] = content.tail, entry.modified
                elif isinstance(entry.content, ImageRange):
                    found[path] = OpenImage(content, entry.content.sums, same[path]), entry.modified
            yield found

    @contextlib.contextmanager
    def linked(self, home: int, candidates: Mapping[str, tuple[int, Sequence[str]]]) -> Iterator[dict[str, ImageRange]]:
        """Find what is here already of the files of a rank, and hold it within a context.

        Args:
            home: the rank
            candidates: by path, its length without the tail, and paths of files that are the same as it

        Returns:
            By path, where its bytes are; without those that are not here.
        """
        found = dict[str, ImageRange]()
        with self._lock:
            for path, (length, same) in candidates.items():
                for entry in filter(None, map(self._files.get, same)):
                    content = entry.content
                    if entry.home == home and isinstance(content, ImageRange) and content.length == length:
                        found[path] = content
            sources = {content.source for content in found.values()}
            self._sources.enter(sources)
        try:
            yield found
        finally:
            self._leave(sources)

    def has_source(self, number: int) -> bool:
        """Whether a source has files or readers."""
        with self._lock:
            return number in self._sources

    def held(self) -> set[int]:
        """The sources that a reader has open now."""
        with self._lock:
            return self._sources.being_read

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(_size(entry.content) for entry in self._files.values())

    def _refuse_taken(self, path: str) -> None:
        if path in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _add(self, path: str, entry: _KeptEntry) -> None:
        if isinstance(entry.content, ImageRange):
            self._sources.add_file(entry.content.source)
        self._files[path] = entry

    def _place_on_disk(self, content: ImageRange | bytes) -> tuple[object, ...] | None:
        """Which bytes of which file on disk a file is; None: it is in an arena, which is filled again, or small."""
        if isinstance(content, bytes) or content.source >= 0:
            return None
        return self._sources.inode(content.source), content.base, content.length

    def _drop(self, paths: Sequence[str]) -> None:
        for path in paths:
            if path in self._files:
                self._let_go(self._files.pop(path).content)

    def _let_go(self, content: ImageRange | bytes) -> None:
        if isinstance(content, ImageRange):
            self._sources.drop_file(content.source)

    def _leave(self, sources: Collection[int]) -> None:
        with self._lock:
            self._sources.leave(sources)

    @contextlib.contextmanager
    def _opened_where(
        self, is_wanted: Callable[[str, _KeptEntry], bool]
    ) -> Iterator[tuple[dict[str, _KeptEntry], dict[int, int]]]:
        """Open files, which stay: what they are by path, and the descriptors of their sources."""
        with ExitStack() as until_closed:
            with self._lock:
                entries = {path: entry for path, entry in self._files.items() if is_wanted(path, entry)}
                contents = [entry.content for entry in entries.values()]
                sources = {content.source for content in contents if isinstance(content, ImageRange)}
                self._sources.enter(sources)
            until_closed.callback(self._leave, sources)
            yield entries, until_closed.enter_context(self._sources.opened(sources))


def _open_content(entry: _KeptEntry, descriptors: Mapping[int, int]) -> LocalPiece | bytes:
    content = entry.content
    if isinstance(content, bytes):
        return content
    is_replica = entry.home is not None
    return LocalPiece(descriptors[content.source], content.base, content.length, content.tail, is_replica)


def _size(content: ImageRange | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.length + len(content.tail)


def _read(descriptor: int, place: ImageRange, path: str) -> bytes:
    data = bytearray()
    while len(data) < place.length:
        part = os.pread(descriptor, place.length - len(data), place.base + len(data))
        if not part:
            raise OSError(errno.EIO, f"its memory ends after {len(data)} of {place.length} bytes", path)
        data += part
    return bytes(data) + place.tail
