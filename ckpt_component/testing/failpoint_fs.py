"""The file system that counts its operations, and that fails at the n-th one where the environment says so.

`CKPT_FAILPOINT` and `CKPT_FAILPOINT_LOG` are inherited by the writer process, and operations are counted over all
processes in the one log, so that "the 7th operation of the save" is the same place in every run.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Sequence

from ..storage.file_system import LOG, SPEC
from ..storage.fs import FsOps
from .failpoints import EFFECTS, Failpoint, FailpointError, parse_failpoints
from .operation_log import append, record


def failpoint_fs(spec: str, log: str, *, durable: bool, atomic_rename: bool, process: str) -> FailpointFs:
    """The file system for what the two environment variables say; see `file_system`."""
    if not log:
        raise FailpointError(f"{SPEC} is set and {LOG} is not; set it to a new file, in which operations are counted.")
    return FailpointFs(parse_failpoints(spec), log, durable=durable, atomic_rename=atomic_rename, process=process)


class FailpointFs(FsOps):
    """Counts every operation in a log that all processes share, and does what a failpoint says at its turn.

    Args:
        failpoints: what is to happen; none: operations are only counted.
        log: a file outside the checkpoints; `read_log` reads it. Beside it come `<log>.<n>`, as long as the n-th
            failpoint has matches, and `<log>.fired`.
        durable: see `FsOps`.
        atomic_rename: see `FsOps`.
        process: see `file_system`.
    """

    def __init__(
        self, failpoints: Sequence[Failpoint], log: str, *, durable: bool, atomic_rename: bool, process: str
    ) -> None:
        super().__init__(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
        self._failpoints = failpoints
        self._log = log
        self._process = process
        self._rank = os.environ.get("RANK", "0")
        #: By thread: how its next write is to be cut, "short" or "torn".
        self._cut: dict[int, str] = {}

    def make_folder(self, path: str) -> None:
        """See `FsOps`."""
        if self._reach("make_folder", path):
            super().make_folder(path)

    def create(self, path: str, size: int = 0) -> int:
        """See `FsOps`."""
        self._reach("create", path)
        return super().create(path, size)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """See `FsOps`."""
        if self._reach("write", _path_of(fd)):
            super().write(fd, buffers, offset)

    def write_some(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FsOps`."""
        cut = self._cut.pop(threading.get_ident(), None)
        if cut is None:
            return super().write_some(fd, buffers, offset)
        first = buffers[0]
        written = super().write_some(fd, [first[: max(first.nbytes // 2, 1)]], offset)
        if cut == "torn":
            _die()
        return written

    def open_direct(self, path: str) -> int:
        """See `FsOps`."""
        self._reach("open_direct", path)
        return super().open_direct(path)

    def open_over(self, path: str) -> int:
        """See `FsOps`."""
        self._reach("open_over", path)
        return super().open_over(path)

    def link(self, source: str, target: str) -> None:
        """See `FsOps`."""
        if self._reach("link", target):
            super().link(source, target)

    def truncate(self, fd: int, size: int) -> None:
        """See `FsOps`."""
        if self._reach("truncate", _path_of(fd)):
            super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        """See `FsOps`."""
        if self._reach("sync", _path_of(fd)):
            super().sync(fd)

    def close(self, fd: int) -> None:
        """See `FsOps`."""
        try:
            self._reach("close", _path_of(fd))
        finally:
            super().close(fd)  # as in Linux, whose close() frees the descriptor also when it fails

    def sync_folder(self, path: str) -> None:
        """See `FsOps`."""
        if self._reach("sync_folder", path):
            super().sync_folder(path)

    def rename_new(self, source: str, target: str) -> None:
        """See `FsOps`."""
        if self._reach("rename_new", target):
            super().rename_new(source, target)

    def replace(self, source: str, target: str) -> None:
        """See `FsOps`."""
        if self._reach("replace", target):
            super().replace(source, target)

    def unlink(self, path: str) -> None:
        """See `FsOps`."""
        if self._reach("unlink", path):
            super().unlink(path)

    def remove_folder(self, path: str) -> None:
        """See `FsOps`."""
        if self._reach("remove_folder", path):
            super().remove_folder(path)

    def names(self, path: str) -> list[str]:
        """See `FsOps`."""
        self._reach("names", path)
        return super().names(path)

    def size(self, path: str) -> int | None:
        """See `FsOps`."""
        self._reach("size", path)
        return super().size(path)

    def read(self, path: str, limit: int) -> bytes:
        """See `FsOps`."""
        self._reach("read", path)
        return super().read(path, limit)

    def modified(self, path: str) -> float:
        """See `FsOps`."""
        self._reach("modified", path)
        return super().modified(path)

    def flock(self, fd: int, how: int) -> None:
        """See `FsOps`."""
        self._reach("flock", _path_of(fd))
        super().flock(fd, how)

    def _reach(self, operation: str, path: str) -> bool:
        """An operation is about to happen. Returns whether it is to be done at all."""
        if operation in EFFECTS:
            append(self._log, record(os.getpid(), self._rank, self._process, operation, path))
        wanted = True
        for place, failpoint in enumerate(self._failpoints):
            if not failpoint.matches(operation, path, self._rank, self._process):
                continue
            number = append(f"{self._log}.{place}", b".")
            if failpoint.first <= number and (failpoint.last is None or number <= failpoint.last):
                wanted = self._act(failpoint, operation, path) and wanted
        return wanted

    def _act(self, failpoint: Failpoint, operation: str, path: str) -> bool:
        action = failpoint.action
        append(f"{self._log}.fired", record(os.getpid(), self._rank, self._process, operation, path))
        if action == "kill":
            _die()
        elif action == "stop":
            # To this very thread: another one might take the signal of the process, while this one went on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif action == "raise":
            code = getattr(errno, failpoint.argument)
            raise OSError(code, os.strerror(code), path)
        elif action == "sleep":
            time.sleep(float(failpoint.argument))
        elif action in ("short", "torn"):
            self._cut[threading.get_ident()] = action
        return action != "skip"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
