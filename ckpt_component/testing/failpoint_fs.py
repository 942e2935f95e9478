"""A file system that counts its operations and fails at the n-th one, as the environment says.

`CKPT_FAILPOINT` and `CKPT_FAILPOINT_LOG` are inherited by the writer process, and operations are counted over all
processes in the one log, so that "the 7th operation of the save" is the same place in every run.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..storage.file_system import LOG, SPEC
from ..storage.fs import FsOps
from .failpoints import EFFECTS, LOOKS, Failpoint, FailpointError, parse_failpoints
from .operation_log import append, record

#: Operations of two paths: the second one is what changes.
_WITH_TARGET = ("link", "rename_new", "replace")
#: Operations whose result the caller needs, which therefore cannot be skipped.
_WITH_RESULT = ("create", "open_direct", "open_over", *LOOKS)


class FailpointFs(FsOps):
    """Counts every operation in a log that all processes share, and does what a failpoint says at its turn.

    The log is a file outside the checkpoints; `read_log` reads it. Beside it come `<log>.<n>`, as long as the n-th
    failpoint has matches, and `<log>.fired`.

    Args:
        durable: see `FsOps`.
        atomic_rename: see `FsOps`.
        process: see `file_system`.

    Raises:
        FailpointError: the environment variables cannot be understood.
    """

    def __init__(self, *, durable: bool, atomic_rename: bool, process: str) -> None:
        super().__init__(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
        self._failpoints = parse_failpoints(os.environ.get(SPEC, ""))
        self._log = os.environ.get(LOG, "")
        if not self._log:
            raise FailpointError(
                f"{SPEC} is set and {LOG} is not; set it to a new file, in which operations are counted."
            )
        self._process = process
        self._rank = os.environ.get("RANK", "0")
        #: By thread: how its next write is to be cut, "short" or "torn".
        self._cut: dict[int, str] = {}

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One system call, which a failpoint may cut in half."""
        cut = self._cut.pop(threading.get_ident(), None)
        if cut is None:
            return super()._pwritev(fd, buffers, offset)
        first = buffers[0]
        written = super()._pwritev(fd, [first[: max(first.nbytes // 2, 1)]], offset)
        if cut == "torn":
            _die()
        return written

    def reach(self, operation: str, path: str) -> bool:
        """An operation is about to happen. Returns whether it is to be done at all."""
        entry = functools.partial(record, os.getpid(), self._rank, self._process, operation, path)
        if operation in EFFECTS:
            append(self._log, entry())
        do_it = True
        for place, failpoint in enumerate(self._failpoints):
            if not failpoint.matches(operation, path, self._rank, self._process):
                continue
            number = append(f"{self._log}.{place}", b".")
            if failpoint.first <= number and (failpoint.last is None or number <= failpoint.last):
                append(f"{self._log}.fired", entry())
                do_it = self._act(failpoint, path) and do_it
        return do_it

    def _act(self, failpoint: Failpoint, path: str) -> bool:
        action = failpoint.action
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


def _counted(operation: str) -> Callable[..., Any]:
    """The method of `FsOps`, counted and made to fail."""
    method = getattr(FsOps, operation)
    index = 1 if operation in _WITH_TARGET else 0

    @functools.wraps(method)
    def run(fs: FailpointFs, *args: Any, **kwargs: Any) -> Any:
        path = args[index] if isinstance(args[index], str) else os.readlink(f"/proc/self/fd/{args[index]}")
        try:
            do_it = fs.reach(operation, path) or operation in _WITH_RESULT
        except OSError:
            if operation == "close":
                method(fs, *args)  # as in Linux, whose close() frees the descriptor also when it fails
            raise
        return method(fs, *args, **kwargs) if do_it or operation == "close" else None

    return run


for _operation in (*EFFECTS, *LOOKS):
    setattr(FailpointFs, _operation, _counted(_operation))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
