"""Files are written while their image is still being filled: up to where it is complete, told through a pipe.

A write job has a pipe of its own, with a record whenever a track (the range of one parallel writer) has advanced, and
one in the end that says that the image is whole, or never will be. Processes that the trainer forks hold the pipe open
as well, so its end alone says little. Standard library alone, as both ends need it.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Sequence

_RECORD = struct.Struct("<QQ")
#: In place of a track's number.
_WHOLE, _NEVER = (1 << 64) - 1, (1 << 64) - 2
#: Of one pipe, so that they fit into the smallest one (a page): telling never waits.
_MOST_RECORDS = 128
#: How often whoever waits looks whether the trainer lives.
_POLL_SECONDS = 0.5


class ImageIncompleteError(Exception):
    """The image that was to be written never became whole."""


class Progress:
    """The trainer's end: what is filled so far, for one image.

    Args:
        tracks: begin and end of each in the image, ascending.
    """

    def __init__(self, tracks: Sequence[tuple[int, int]]) -> None:
        self.tracks = tracks
        self._marks = [start for start, _ in tracks]
        self._told = list(self._marks)
        self._step = max(sum(end - start for start, end in tracks) // _MOST_RECORDS, 1)
        self._whole: bool | None = None
        self._pipe: int | None = None
        self._lock = threading.Lock()

    def reached(self, track: int, mark: int) -> None:
        """A track is complete up to this place of the image."""
        with self._lock:
            self._marks[track] = mark
            self._tell_track(track, mark)

    def end(self, whole: bool) -> None:
        """The image is whole; or it never will be."""
        with self._lock:
            self._whole = whole
            self._tell_end(whole)

    def follow(self) -> int:
        """Tell of it through a new pipe, from what is complete now. Returns the end to read from: the caller's."""
        with self._lock:
            reader, self._pipe = os.pipe()
            self._told = [start for start, _ in self.tracks]
            for track, mark in enumerate(self._marks):
                self._tell_track(track, mark)
            if self._whole is not None:
                self._tell_end(self._whole)
            return reader

    def leave(self) -> None:
        """Nobody follows any more."""
        with self._lock:
            self._close()

    def _tell_track(self, track: int, mark: int) -> None:
        if mark - self._told[track] >= self._step:
            self._told[track] = mark
            self._tell(track, mark)

    def _tell_end(self, whole: bool) -> None:
        self._tell(_WHOLE if whole else _NEVER, 0)
        self._close()

    def _tell(self, track: int, mark: int) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, _RECORD.pack(track, mark))
        except BrokenPipeError:
            self._close()  # who read it is gone, which whoever waits for its answer is told

    def _close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


class FilledSource:
    """The writer's end: an image in memory, whose bytes are given when they are there.

    Args:
        memory: the image.
        tracks: as `Progress` has them.
        pipe: of `Progress.follow`; stays the caller's.
        until: when to wait no longer (monotonic seconds).
        parent: process id of the trainer, whose child this process is.
    """

    def __init__(
        self, memory: memoryview, tracks: Sequence[tuple[int, int]], pipe: int, until: float, parent: int
    ) -> None:
        self._memory = memory
        self._tracks = tracks
        self._marks = [start for start, _ in tracks]
        self._pipe = pipe
        self._until = until
        self._parent = parent
        self._whole = False
        self._error: BaseException | None = None
        self._receiving = False
        self._changed = threading.Condition()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    @property
    def nbytes(self) -> int:
        """Of the image."""
        return self._memory.nbytes

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The one slice, once it is filled. Beside it counts what lies in the same page as its ends.

        Raises:
            ImageIncompleteError: it never will be.
        """
        self._wait(start, end)
        return [self._memory[start:end]]

    def wait_whole(self) -> None:
        """Return when all is filled, and was not changed meanwhile.

        Raises:
            ImageIncompleteError: it never will be.
        """
        self._wait(0, None)

    def _wait(self, start: int, end: int | None) -> None:
        while not self._ready(start, end):
            self._receive()

    def _ready(self, start: int, end: int | None) -> bool:
        """Whether it is there. False: this thread is to receive next, and no other does meanwhile."""
        with self._changed:
            while not self._is_there(start, end):
                if self._error is not None:
                    raise self._error
                if not self._receiving:
                    self._receiving = True
                    return False
                self._changed.wait()  # for the one that receives, which has a deadline
            return True

    def _receive(self) -> None:
        """Take the next records, and let all threads look again."""
        data, error = b"", None
        try:
            data = self._next_records()
        except BaseException as failure:
            error = failure
        with self._changed:
            self._receiving, self._error = False, error
            for track, mark in _RECORD.iter_unpack(data):
                if track == _WHOLE:
                    self._whole = True
                elif track == _NEVER:
                    self._error = ImageIncompleteError("the snapshot failed")
                else:
                    self._marks[track] = mark
            self._changed.notify_all()

    def _is_there(self, start: int, end: int | None) -> bool:
        if self._whole:
            return True
        return end is not None and all(
            mark >= min(end, last)
            for mark, (first, last) in zip(self._marks, self._tracks, strict=True)
            if first < end and last > start
        )

    def _next_records(self) -> bytes:
        while True:
            left = self._until - time.monotonic()
            if self._poll.poll(max(min(left, _POLL_SECONDS), 0) * 1000):
                data = os.read(self._pipe, _RECORD.size * _MOST_RECORDS)  # writes of a record are not torn
                if data:
                    return data
                raise ImageIncompleteError("the trainer is gone")
            if os.getppid() != self._parent:
                raise ImageIncompleteError("the trainer is gone")
            if left <= 0:
                raise ImageIncompleteError("the snapshot was not complete in time")
