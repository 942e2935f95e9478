"""Tells the disk what will be read next, so that it works while bytes are summed and copied."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType

logger = logging.getLogger(__name__)

#: Announced beyond what has been read; more would be pushed out again where memory is short.
_LEAD_BYTES = 128 << 20
#: The system answers an announcement once all of it is on its way.
_STEP_BYTES = 4 << 20
#: What is in memory is looked at in steps that grow up to this, because looking takes the GIL from those who read.
_MOST_BYTES = 32 << 20
#: Ranges of a file are joined over such a gap, the padding between items. Nobody reads it, so it must be little.
_GAP_BYTES = 64


class ReadAhead:
    """A thread that announces ranges of files, a bounded way ahead of those who read. A context manager.

    A computer that begins again after a crash has nothing of its checkpoint in memory; without this its disk rests
    whenever all threads sum what they have read.

    Args:
        ranges: descriptor, offset and length, in about the order in which they will be read. The descriptors stay open
            while the context is entered.
    """

    def __init__(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        self._ranges = ranges
        self._changed = threading.Condition()
        self._read = self._announced = 0
        self._resting = False
        self._ended = False
        self._thread = threading.Thread(target=self._announce, name="ckpt-read-ahead", daemon=True)

    def advance(self, nbytes: int) -> None:
        """So many more bytes were read."""
        with self._changed:
            self._read += nbytes
            # Seldom: a thread that wakes up takes the GIL from those who read.
            if self._resting and self._announced - self._read <= _LEAD_BYTES // 2:
                self._resting = False
                self._changed.notify()

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()  # it is in no call but an announcement, which waits for the disk as reads do

    def _announce(self) -> None:
        step = _STEP_BYTES
        for descriptor, position, end in _joined(self._ranges):
            while position < end:
                with self._changed:
                    self._resting = self._announced - self._read >= _LEAD_BYTES
                    while self._resting and not self._ended:
                        self._changed.wait()
                    if self._ended:
                        return
                nbytes = min(step, end - position)
                try:
                    if _is_cached(descriptor, position) and _is_cached(descriptor, position + nbytes - 1):
                        step = min(2 * step, _MOST_BYTES)
                    elif nbytes > _STEP_BYTES:
                        step = _STEP_BYTES  # some of it may be there: looked at again
                        continue
                    else:
                        os.posix_fadvise(descriptor, position, nbytes, os.POSIX_FADV_WILLNEED)
                        step = _STEP_BYTES
                except OSError as error:
                    # Advice is all it is: what is wrong with the file, its reader will tell.
                    logger.info("reads are not announced to the disk, which refuses that (%s)", error)
                    return
                position += nbytes
                self._announced += nbytes


def _joined(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Descriptor, begin and end of ranges, neighbours as one; what is between them is announced with them."""
    open_one: tuple[int, int, int] | None = None
    for descriptor, offset, length in ranges:
        if open_one is not None and open_one[0] == descriptor and 0 <= offset - open_one[2] <= _GAP_BYTES:
            open_one = descriptor, open_one[1], offset + length
            continue
        if open_one is not None:
            yield open_one
        open_one = descriptor, offset, offset + length
    if open_one is not None:
        yield open_one


def _is_cached(descriptor: int, position: int) -> bool:
    """Whether a byte is in memory. To announce what is there already takes as long as to copy a quarter of it."""
    try:
        return os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT) == 1
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):  # it is not, or this file system does not tell
            return False
        raise
