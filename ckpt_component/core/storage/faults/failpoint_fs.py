"""A file system that counts its operations and fails at the n-th one, controlled by environment variables.

The writer process inherits `CKPT_FAILPOINT` and `CKPT_FAILPOINT_LOG`, and all processes count operations in one log,
so "the 7th operation of the save" is the same in every run.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from ...outside import OUTSIDE
from ..files import FileStorage
from . import LOG, SPEC
from .failpoints import EFFECTS, LOOKS, Failpoint, FailpointError, parse_failpoints
from .operation_log import append, record

#: Operations with two paths, of which the second one changes.
_WITH_TARGET = ("link", "share", "rename_new", "exchange", "replace")
#: Operations that cannot be skipped, because the caller needs their result.
_WITH_RESULT = ("create", "share", "open_direct", "open_over", "open_again", *LOOKS)

#: `cut`: how to cut the next write of a thread, "short" or "torn".
_of_thread = OUTSIDE.thread_values()


class FailpointFs(FileStorage):
    """Counts every operation in a log shared by all processes, and triggers failpoints.

    The log is a file outside the checkpoints, for `read_log`. Next to it are `<log>.<n>`, with one byte per match of
    the n-th failpoint, and `<log>.fired`, the log of triggered failpoints.

    Args:
        durable: see `FileStorage`
        atomic_rename: see `FileStorage`
        process: see `storage_at`

    Raises:
        FailpointError: the environment variables are invalid
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

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One system call, which a failpoint may cut in half."""
        cut, _of_thread.cut = getattr(_of_thread, "cut", None), None
        if cut is None:
            return super()._pwritev(fd, buffers, offset)
        first = buffers[0]
        written = super()._pwritev(fd, [first[: max(first.nbytes // 2, 1)]], offset)
        if cut == "torn":
            _die()
        return written

    def reach(self, operation: str, path: str) -> bool:
        """Called before an operation. Returns False to skip it."""
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
            # A signal to the process could be taken by another thread while this one continues.
            signal.raise_signal(signal.SIGSTOP)
        elif action == "raise":
            code = getattr(errno, failpoint.argument)
            raise OSError(code, os.strerror(code), path)
        elif action == "sleep":
            self.outside.sleep(float(failpoint.argument))
        elif action in ("short", "torn"):
            _of_thread.cut = action
        return action != "skip"


def _counted(operation: str) -> Callable[..., Any]:
    """A method of `FileStorage`, wrapped to count and to trigger failpoints."""
    method = getattr(FileStorage, operation)
    index = 1 if operation in _WITH_TARGET else 0

    @functools.wraps(method)
    def run(fs: FailpointFs, *args: Any, **kwargs: Any) -> Any:
        path = args[index] if isinstance(args[index], str) else os.readlink(f"/proc/self/fd/{args[index]}")
        try:
            do_it = fs.reach(operation, path) or operation in _WITH_RESULT
        except OSError:
            if operation == "close":
                method(fs, *args)  # Linux's close() frees the descriptor even if it fails
            raise
        return method(fs, *args, **kwargs) if do_it or operation == "close" else None

    return run


for _operation in (*EFFECTS, *LOOKS):
    setattr(FailpointFs, _operation, _counted(_operation))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
