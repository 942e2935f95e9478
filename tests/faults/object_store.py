"""A folder that behaves as an object store does when it is mounted, with the answers that such a store may lose.

An object is there, whole, when its file is closed, and not before; it needs no folder. Nothing is renamed, and nothing has
two names. A new object is put under the condition that there is none of its name.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt_component.core.commit.names import MANIFEST
from ckpt_component.core.storage.files import FileStorage

#: What a put may come to: all is well; it fails; it is done and its answer is lost; half of it is there.
PUTS = ("done", "refused", "lost", "torn")


class ObjectStore(FileStorage):
    """One client of the store.

    Args:
        uploads: an empty folder outside the checkpoints, for what is not closed yet.
        puts: what the puts of `manifest.json` come to, one after the other, of `PUTS`; then all are well.
        unreadable: how many reads of `manifest.json` fail.
        before_put: called with the path before every put.
    """

    def __init__(
        self,
        uploads: str,
        puts: Sequence[str] = (),
        unreadable: int = 0,
        before_put: Callable[[str], Any] = lambda path: None,
    ) -> None:
        super().__init__(atomic_rename=False)
        self._uploads = tempfile.mkdtemp(dir=uploads)
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, str, bool]] = {}  # descriptor -> draft, object, whether it must be new
        self._lock = threading.Lock()
        self.puts = list(puts)
        self.unreadable = unreadable
        self.before_put = before_put
        self.log: list[str] = []

    def create(self, path: str, size: int = 0) -> int:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self._upload(path, new=True)

    def open_over(self, path: str) -> int:
        return self._upload(path, new=False)

    def open_append(self, path: str) -> int:
        """An object is put anew, with what it held before."""
        before = b"" if not os.path.exists(path) else Path(path).read_bytes()
        fd = self._upload(path, new=False)
        os.write(fd, before)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return fd

    def _upload(self, path: str, *, new: bool) -> int:
        draft = os.path.join(self._uploads, str(next(self._numbers)))
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._lock:
            self._open[fd] = (draft, path, new)
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            draft, path, new = self._open.pop(fd)
        os.close(fd)
        self.before_put(path)
        outcome = self.puts.pop(0) if self.puts and os.path.basename(path) == MANIFEST else "done"
        self.log.append(f"put {path}")
        if outcome == "torn":
            os.truncate(draft, os.path.getsize(draft) // 2)
        if outcome != "refused":
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if new:
                os.link(draft, path)
            else:
                os.replace(draft, path)
        if outcome != "done":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def sync(self, fd: int) -> None:
        """What is not closed is not there."""

    def sync_folder(self, path: str) -> None:
        """There are no folders."""

    def open_direct(self, path: str) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)

    def rename_new(self, source: str, target: str) -> bool:
        raise AssertionError(f"{source} was to be renamed")

    def replace(self, source: str, target: str) -> None:
        raise AssertionError(f"{source} was to be renamed")

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self.log.append(f"unlink {path}")
        super().unlink(path, dir_fd=dir_fd)

    def read(self, path: str, limit: int) -> bytes:
        if os.path.basename(path) == MANIFEST and self.unreadable:
            self.unreadable -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read(path, limit)
