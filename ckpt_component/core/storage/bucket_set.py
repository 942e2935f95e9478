"""`ObjectSet`: the objects below a folder of a bucket, read by ranges.

What a load will read is known before it begins. Neighbouring ranges become one request of some megabytes; several
requests are on their way while what has arrived is copied to where it belongs, so memory is bounded. A request that
fails is repeated for a while.
"""

from __future__ import annotations

import errno
import io
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import IO, NamedTuple, Protocol

from ..outside import Future, Outside, Pool
from .bucket_store import patiently
from .file_set import FileSet, FileStream, RangeRead, extents_of
from .safe_open import read_failure

#: Most bytes of a request.
_PIECE_BYTES = 4 << 20
#: Requests on their way before the one that a thread waits for has arrived. With four threads in different objects,
#: the most memory is that of 36 pieces, 144 MB; in neighbouring ranges, as usual, a third of it.
_AHEAD = 8
_REQUESTS = 16
_THREADS = 4
#: Gaps up to this size are fetched: a request costs more.
_GAP_BYTES = 256 << 10
#: Least bytes to fetch where reads come one by one, such as those of small objects one after the other.
_NEAR_BYTES = 256 << 10
_STREAM_BYTES = 256 << 10


class Bucket(Protocol):
    """What a set of objects is read with; pauses between its requests go by `outside`."""

    outside: Outside

    def size(self, path: str) -> int | None:
        """The size of an object in bytes; None if there is none."""
        ...

    def read_range(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of an object."""
        ...


class ObjectSet(FileSet):
    """The objects below a folder.

    Args:
        storage: what they are read with
        folder: folder of the checkpoint
    """

    _batch_bytes = _PIECE_BYTES
    _least_batch_bytes = 1 << 20

    def __init__(self, storage: Bucket, folder: str) -> None:
        super().__init__(folder, storage.outside)
        self._storage = storage
        self._sizes: dict[str, int] = {}
        self._ahead: _ReadAhead | None = None
        self._pool: Pool | None = None
        #: Name, start and bytes of what was fetched last for a read that nothing was known of before.
        self._near: tuple[str, int, memoryview] = ("", 0, memoryview(b""))

    def size(self, name: str) -> int:
        if name not in self._sizes:
            path = self._path(name)
            try:
                size = patiently(lambda: self._storage.size(path), path, outside=self._storage.outside)
                if size is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            except OSError as error:
                raise read_failure(path, error) from error
            self._sizes[name] = size
        return self._sizes[name]

    def stream(self, name: str) -> IO[bytes]:
        return io.BufferedReader(FileStream(self, name, self.size(name)), _STREAM_BYTES)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        end = offset + buffer.nbytes
        if end > self.size(name):
            return False
        ahead = self._ahead
        try:
            while buffer.nbytes:
                fetched = None if ahead is None else ahead.at(name, offset)
                if fetched is None:
                    fetched = self._fetched_near(name, offset, buffer.nbytes)
                part = fetched[: buffer.nbytes]
                buffer[: part.nbytes] = part
                buffer = buffer[part.nbytes :]
                offset += part.nbytes
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error
        return True

    def _fetched_near(self, name: str, offset: int, length: int) -> memoryview:
        """The bytes of an object from an offset on, at least one."""
        near, start, data = self._near
        if near != name or not start <= offset < start + data.nbytes:
            end = min(offset + max(length, _NEAR_BYTES), offset + _PIECE_BYTES, self.size(name))
            start, data = offset, self._fetch(name, offset, end)
            self._near = name, start, data
        return data[offset - start :]

    def _fetch(self, name: str, start: int, end: int) -> memoryview:
        path = os.path.join(self._folder, name)

        def fetch() -> memoryview:
            data = self._storage.read_range(path, start, end - start)
            if data.nbytes != end - start:
                raise OSError(errno.EIO, f"{data.nbytes} bytes came of {end - start} at {start}", path)
            return data

        return patiently(fetch, path, outside=self._storage.outside)

    def _forget(self, name: str, offset: int, length: int) -> None:
        self._near = "", 0, memoryview(b"")
        if self._ahead is not None:
            self._ahead.forget(name, offset, offset + length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return min(_THREADS, len(ordered))

    def _begin(self, batches: Sequence[Sequence[RangeRead]]) -> None:
        pieces: list[list[_FetchedRange]] = []
        ends: dict[str, int] = {}
        for batch in batches:
            pieces.append([])
            for name, start, stop in extents_of(batch, _GAP_BYTES):
                # What several batches read, such as tied tensors, is a piece of the first one.
                start, stop = max(start, ends.get(name, 0)), min(stop, self.size(name))
                ends[name] = max(stop, ends.get(name, 0))
                for first in range(start, stop, _PIECE_BYTES):
                    pieces[-1].append(_FetchedRange(name, first, min(first + _PIECE_BYTES, stop)))
        if self._pool is None:
            self._pool = self.outside.pool(_REQUESTS, "ckpt-fetch")
        self._ahead = _ReadAhead(pieces, self._fetch, self._pool, self.outside)

    def _after(self, number: int) -> None:
        if self._ahead is not None:
            self._ahead.drop(number)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # requests on their way end by their own deadlines
        self._ahead, self._pool, self._near = None, None, ("", 0, memoryview(b""))


class _FetchedRange(NamedTuple):
    """A range that one request fetches."""

    name: str
    start: int
    end: int


class _ReadAhead:
    """Fetches pieces a bounded way ahead of those that threads wait for, and drops those that they have passed.

    Every batch is read by one thread, in order. A piece that is needed again after it was dropped is fetched again.

    Args:
        pieces: those of each batch, in the order of the reads, without overlaps
        fetch: fetches a range of an object
        pool: runs `fetch`
        outside: of the threads that read
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[_FetchedRange]],
        fetch: Callable[[str, int, int], memoryview],
        pool: Pool,
        outside: Outside,
    ) -> None:
        self._pieces = list(chain.from_iterable(pieces))
        self._ends = list(accumulate(map(len, pieces), initial=0))
        self._fetch = fetch
        self._pool = pool
        self._outside = outside
        self._lock = outside.lock()
        self._places = [(piece.name, piece.start) for piece in self._pieces]
        self._of_thread = outside.thread_values()
        #: The piece that each thread is at, by what stands for the thread.
        self._current: dict[object, int] = {}
        self._passed = bytearray(len(self._pieces))
        self._fetched: dict[int, Future[memoryview]] = {}

    def at(self, name: str, offset: int) -> memoryview | None:
        """The bytes of an object from an offset to the end of a piece; None if no piece has them.

        Raises:
            OSError: they cannot be fetched
        """
        number = bisect_right(self._places, (name, offset)) - 1
        piece = self._pieces[number] if number >= 0 else None
        if piece is None or piece.name != name or offset >= piece.end:
            return None
        with self._lock:
            self._leave(number)
            self._current[self._thread] = number
            future = self._submitted(number)
            for upcoming in range(number + 1, min(number + 1 + _AHEAD, len(self._pieces))):
                if not self._passed[upcoming]:
                    self._submitted(upcoming)
        self._outside.wait_for([future], None)
        return future.result(0)[offset - piece.start :]

    def drop(self, batch: int) -> None:
        """Drop the pieces of a batch that this thread has read."""
        with self._lock:
            self._leave()
            for number in range(*self._ends[batch : batch + 2]):
                self._drop(number)

    def forget(self, name: str, start: int, end: int) -> None:
        """Drop the pieces that overlap a range; they are fetched again."""
        with self._lock:
            for number, piece in enumerate(self._pieces):
                if piece.name == name and piece.start < end and start < piece.end:
                    self._fetched.pop(number, None)

    def _leave(self, following: int | None = None) -> None:
        """Drop the piece that this thread was at, unless another one is at it or it stays."""
        before = self._current.pop(self._thread, None)
        if before is not None and before not in (following, *self._current.values()):
            self._drop(before)

    @property
    def _thread(self) -> object:
        """Stands for the calling thread."""
        thread = getattr(self._of_thread, "thread", None)
        if thread is None:
            thread = self._of_thread.thread = object()
        return thread

    def _submitted(self, number: int) -> Future[memoryview]:
        if number not in self._fetched:
            self._fetched[number] = self._pool.submit(self._fetch, *self._pieces[number])
        return self._fetched[number]

    def _drop(self, number: int) -> None:
        self._passed[number] = True
        self._fetched.pop(number, None)
