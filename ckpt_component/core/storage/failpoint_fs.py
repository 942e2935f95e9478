"""A file system that counts its operations and fails at chosen ones, for tests; production never imports it.

The writer process inherits `CKPT_FAILPOINT` and `CKPT_FAILPOINT_LOG`, and all processes count operations in one log,
so "the 7th operation of the save" is the same in every run.

    CKPT_FAILPOINT_LOG=/dev/shm/ops                              the log in which operations are counted
    CKPT_FAILPOINT="rename_new:nth=2:rank=1:action=kill"         separate several with ";"

The first word is the name of an operation of `Storage`, or `any` for all that change something. `nth=2` selects the
second match, `from=2` the second and all later ones; the default is all. Matches can be restricted by `rank=` (the
environment variable RANK), `process=` (one of `PROCESSES`) and `path=` (a part of the path).
`action=` comes last and happens before the operation or instead of it:

    kill          SIGKILL to the process            raise:ENOSPC  OSError with this errno; close still closes the file
    stop          SIGSTOP to the process            sleep:5       wait 5 seconds, then do the operation
    skip          do nothing (not for an open)      short         a write writes only half of its bytes at first
    torn          write half of the bytes, then SIGKILL
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..outside import OUTSIDE
from .files import FAILPOINT, FAILPOINT_LOG, FileStorage

#: Length of every record, so that the position in the file gives a record's number.
RECORD_BYTES = 512


@dataclass(frozen=True)
class Operation:
    """One record of the log."""

    pid: int
    rank: str
    process: str
    operation: str
    path: str


def read_log(path: str) -> list[Operation]:
    """The operations of a log (or of `<log>.fired`), in order; none if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as stream:
        data = stream.read()
    operations = []
    for start in range(0, len(data), RECORD_BYTES):
        text = data[start : start + RECORD_BYTES].decode(errors="replace").strip()
        pid, rank, process, operation, *file = text.split(" ", 4)
        operations.append(Operation(int(pid), rank, process, operation, "".join(file)))
    return operations


def record(pid: int, rank: str, process: str, operation: str, path: str) -> bytes:
    """Format one record, padded.

    Raises:
        ValueError: the path is too long for a record; paths are never truncated, so that they stay distinct
    """
    head = f"{pid} {rank} {process} {operation} ".encode()
    tail = os.fsencode(path).replace(b"\n", b"?")
    if len(head) + len(tail) >= RECORD_BYTES:
        raise ValueError(f"{path} does not fit into a record of {RECORD_BYTES} bytes; test in a shorter folder.")
    return (head + tail).ljust(RECORD_BYTES - 1) + b"\n"


def append(path: str, data: bytes) -> int:
    """Append one record and return its number, from 1. Opens the file each time, so it is safe in forks and threads."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        # An appending write leaves the position at the end of its own data, even if others append.
        return os.lseek(fd, 0, os.SEEK_CUR) // len(data)
    finally:
        os.close(fd)


#: Every operation that changes something, in the order of `Storage`.
EFFECTS = (
    "make_folder",
    "create",
    "open_direct",
    "open_over",
    "open_again",
    "link",
    "share",
    "write",
    "copy",
    "truncate",
    "sync",
    "close",
    "sync_folder",
    "rename_new",
    "exchange",
    "replace",
    "unlink",
    "remove_folder",
)
#: Operations that change nothing: they fail only if named, and are not counted.
LOOKS = ("names", "size", "modified", "read", "flock")
_ACTIONS = ("kill", "stop", "skip", "torn", "short")
_OF_WRITES = ("torn", "short")
#: The processes of a run, as `storage_at` is told.
PROCESSES = ("trainer", "writer", "upload", "export", "publish", "pull")


class FailpointError(CheckpointError, ValueError):
    """`CKPT_FAILPOINT` is invalid; the text names the part."""


@dataclass(frozen=True)
class Failpoint:
    """One failpoint; see the top of this file.

    Attributes:
        operation: one of `EFFECTS` or `LOOKS`, or `any`
        action: what happens
        argument: the action's errno by name, or its seconds
        first: number of the first match that triggers it, from 1
        last: number of the last match that triggers it; None: no limit
        rank: the rank, or None for all
        process: `trainer`, `writer`, or None for both
        path: a part of the path
    """

    operation: str
    action: str
    argument: str = ""
    first: int = 1
    last: int | None = None
    rank: str | None = None
    process: str | None = None
    path: str = ""

    def matches(self, operation: str, path: str, rank: str, process: str) -> bool:
        """Whether this failpoint counts an operation."""
        selected = operation == self.operation or (self.operation == "any" and operation in EFFECTS)
        return (
            selected
            and self.rank in (None, rank)
            and self.process in (None, process)
            and (not self.path or self.path in path)
        )


def parse_failpoints(text: str) -> list[Failpoint]:
    """Parse the value of `CKPT_FAILPOINT`.

    Raises:
        FailpointError: a part is invalid; the text names it
    """
    return [_parse(part.strip()) for part in text.split(";") if part.strip()]


def _parse(text: str) -> Failpoint:
    where, _, action = text.partition(":action=")
    operation, *conditions = where.split(":")
    if operation not in (*EFFECTS, *LOOKS, "any"):
        raise FailpointError(f"{FAILPOINT}: unknown operation {operation!r}; use any, {', '.join(EFFECTS + LOOKS)}.")
    values: dict[str, str] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key not in ("nth", "from", "rank", "process", "path") or not value:
            known = "nth=2, from=2, rank=1, ..."
            raise FailpointError(f"{FAILPOINT}: {condition!r} in {text!r} is not understood; use {known}")
        if key in values or {key, *values} >= {"nth", "from"}:
            twice = key if key in values else "of nth and from"
            raise FailpointError(f"{FAILPOINT}: {text!r} has more than one {twice}.")
        values[key] = value
    if values.get("process", PROCESSES[0]) not in PROCESSES:
        raise FailpointError(f"{FAILPOINT}: process={values['process']} in {text!r} is none of {', '.join(PROCESSES)}.")
    kind, _, argument = action.partition(":")
    valid = action in _ACTIONS and (action not in _OF_WRITES or operation in ("write", "any"))
    if kind == "raise":
        valid = isinstance(getattr(errno, argument, None), int)  # `errno.errorcode` lacks aliases
    elif kind == "sleep":
        valid = argument.replace(".", "", 1).isdigit()
    if not valid:
        raise FailpointError(f"{FAILPOINT}: action={action!r} in {text!r}; use kill, stop, raise:ENOSPC, sleep:5 ...")
    number = values.get("nth", values.get("from", "1"))
    if not number.isdigit() or int(number) < 1:
        text = f"{number!r} in {text!r} is not the number of an operation; the first one is 1"
        raise FailpointError(f"{FAILPOINT}: {text}.")
    last = int(number) if "nth" in values else None
    path = values.get("path", "")
    return Failpoint(operation, kind, argument, int(number), last, values.get("rank"), values.get("process"), path)


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
        self._failpoints = parse_failpoints(os.environ.get(FAILPOINT, ""))
        self._log = os.environ.get(FAILPOINT_LOG, "")
        if not self._log:
            raise FailpointError(
                f"{FAILPOINT} is set and {FAILPOINT_LOG} is not; set it to a new file, in which operations are counted."
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
