"""Parse `CKPT_FAILPOINT`, which defines the operations of a save that fail, and how.

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
from dataclasses import dataclass

from ....errors import CheckpointError
from . import SPEC

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
        raise FailpointError(f"{SPEC}: unknown operation {operation!r}; use any, {', '.join(EFFECTS + LOOKS)}.")
    values: dict[str, str] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key not in ("nth", "from", "rank", "process", "path") or not value:
            raise FailpointError(f"{SPEC}: {condition!r} in {text!r} is not understood; use nth=2, from=2, rank=1, ...")
        if key in values or {key, *values} >= {"nth", "from"}:
            raise FailpointError(f"{SPEC}: {text!r} has more than one {key if key in values else 'of nth and from'}.")
        values[key] = value
    if values.get("process", PROCESSES[0]) not in PROCESSES:
        raise FailpointError(f"{SPEC}: process={values['process']} in {text!r} is none of {', '.join(PROCESSES)}.")
    kind, _, argument = action.partition(":")
    valid = action in _ACTIONS and (action not in _OF_WRITES or operation in ("write", "any"))
    if kind == "raise":
        valid = isinstance(getattr(errno, argument, None), int)  # `errno.errorcode` lacks aliases
    elif kind == "sleep":
        valid = argument.replace(".", "", 1).isdigit()
    if not valid:
        raise FailpointError(f"{SPEC}: action={action!r} in {text!r}; use kill, stop, raise:ENOSPC, sleep:5 ...")
    number = values.get("nth", values.get("from", "1"))
    if not number.isdigit() or int(number) < 1:
        raise FailpointError(f"{SPEC}: {number!r} in {text!r} is not the number of an operation; the first one is 1.")
    last = int(number) if "nth" in values else None
    path = values.get("path", "")
    return Failpoint(operation, kind, argument, int(number), last, values.get("rank"), values.get("process"), path)
