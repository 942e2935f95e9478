"""Keeps the newest checkpoint in the page cache, so that a restart on this host reads it from memory.

Direct writes leave nothing there. So the idle writer process has the kernel read its files once after the commit, in
small pieces and with pauses, and drops those of the checkpoint before. It takes no copy of them: training may have the
other half of this core. Only where memory is plentiful, and on local disks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from ..available_memory import is_plentiful
from ..storage.safe_open import forget, is_on_disk, open_regular
from .request import WriteRequest, WriteResult

#: Bytes to read at a time, until the next look at the available memory, and per second.
_PIECE_BYTES = 4 << 20
_LOOK_BYTES = 32 << 20
_MAX_RATE = 256 << 20


class CachedFiles:
    """The files of one checkpoint that this process has written, and those that it still has to read."""

    def __init__(self) -> None:
        #: By device and inode: the checkpoint before may have the same file by another path.
        self._paths: dict[tuple[int, int], str] = {}
        self._unread: list[str] = []
        self._offset = self._size = 0
        self._fd: int | None = None
        self._needed = 0
        self._rate = float(_MAX_RATE)
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
        folder, paths = request.attempt.protocol.files_of(request.attempt), dict[tuple[int, int], str]()
        try:
            on_disk = is_on_disk(folder)
            for file in result["files"]:
                path = os.path.join(folder, file["name"])
                status = os.stat(path)
                paths[status.st_dev, status.st_ino] = path
        except OSError:  # it was given up, so the one before is still the newest
            return
        if not on_disk or not self.fit(request):
            self.drop()
            return
        read = {identity for identity, path in self._paths.items() if path not in self._unread}
        self._close()
        _drop([path for identity, path in self._paths.items() if identity not in paths])
        self._paths = paths
        self._unread = [path for identity, path in paths.items() if identity not in read][::-1]
        self._needed = request.source.nbytes
        self._rate = min(request.options.max_bytes_per_second or _MAX_RATE, _MAX_RATE)
        self.pause = 0.0 if self._unread else None

    def read_piece(self) -> None:
        """Read the next piece, and set `pause`."""
        if self.pause is None:
            return
        try:
            if self._offset % _LOOK_BYTES == 0 and not is_plentiful(self._needed):
                self.drop()
                return
            if self._fd is None:
                self._fd, self._offset = open_regular(self._unread[-1]), 0
                self._size = os.fstat(self._fd).st_size
            os.posix_fadvise(self._fd, self._offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # deleted by `keep`
                print(f"ckpt writer: {self._unread[-1]} is not kept in the page cache: {error}", file=sys.stderr)
            self.drop()
            return
        self._offset += _PIECE_BYTES
        self.pause = min(_PIECE_BYTES / self._rate, 1.0)
        if self._offset >= self._size:
            self._close()
            self._unread.pop()
            if not self._unread:
                self.pause = None

    def drop(self) -> None:
        """Stop reading, and drop the files from the page cache."""
        self._close()
        self.pause, self._unread = None, []
        _drop([*self._paths.values()])
        self._paths = {}

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
