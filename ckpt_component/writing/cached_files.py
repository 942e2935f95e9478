"""Keeps the newest checkpoint in the page cache, so that a restart on this host reads it from memory.

Direct writes leave nothing there. So the idle writer process reads its files once after the commit, in small pieces and
with pauses, and drops those of the checkpoint before. Only where memory is plentiful, and on local disks.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence

from ..memory.available import is_plentiful
from ..storage.fs_type import is_on_disk
from ..storage.safe_open import forget, open_regular
from .request import WriteRequest, WriteResult

#: Bytes to read at a time, and until the next look at the available memory; how many times as long the pauses are.
_PIECE_BYTES = 1 << 20
_LOOK_BYTES = 32 << 20
_PAUSES = 2.0


class CachedFiles:
    """The files of one checkpoint that this process has written, and those that it still has to read."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._unread: list[str] = []
        self._offset = 0
        self._fd: int | None = None
        self._needed = 0
        self._rate: float | None = None
        self._buffer = bytearray()
        #: Seconds until the next piece is to be read; None: nothing is to be read.
        self.pause: float | None = None

    @staticmethod
    def fit(request: WriteRequest) -> bool:
        """Whether the files of a request, and of the other ranks of this host, fit well into memory."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdecimal() else request.world_size
        return request.fs.has_direct_io and is_plentiful(request.source.nbytes * ranks)

    def replace(self, request: WriteRequest, result: WriteResult) -> None:
        """Drop the files of the checkpoint before, and begin to read those of a request that may be committed."""
        folder = request.attempt.target
        try:
            on_disk = is_on_disk(folder)
        except OSError:  # it was given up, so the one before is still the newest
            return
        self.drop()
        if not on_disk or not self.fit(request):
            return
        self._paths = [os.path.join(folder, file["name"]) for file in result["files"]]
        self._unread, self._needed = self._paths[::-1], request.source.nbytes
        self._rate = request.options.max_bytes_per_second
        self._buffer, self.pause = bytearray(_PIECE_BYTES), 0.0

    def read_piece(self) -> None:
        """Read the next piece, and set `pause`."""
        if self.pause is None:
            return
        started = time.monotonic()
        try:
            if self._offset % _LOOK_BYTES == 0 and not is_plentiful(self._needed):
                self.drop()
                return
            if self._fd is None:
                self._fd, self._offset = open_regular(self._unread[-1]), 0
            count = os.preadv(self._fd, [self._buffer], self._offset)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # deleted by `keep`
                print(f"ckpt writer: {self._unread[-1]} is not kept in the page cache: {error}", file=sys.stderr)
            self.drop()
            return
        self._offset += count
        self.pause = min(max(_PAUSES * (time.monotonic() - started), count / (self._rate or math.inf)), 1.0)
        if count < _PIECE_BYTES:
            self._close()
            self._unread.pop()
            if not self._unread:
                self.pause, self._buffer = None, bytearray()

    def drop(self) -> None:
        """Stop reading, and drop the files from the page cache."""
        self._close()
        self.pause, self._buffer, self._unread = None, bytearray(), []
        _drop(self._paths)
        self._paths = []

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _drop(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # deleted since
            fd = open_regular(path)
            try:
                forget(fd)
            finally:
                os.close(fd)
