"""What `CKPT_FAILPOINT` says: which operation of a save fails, and how.

    CKPT_FAILPOINT_LOG=/dev/shm/ops                              where operations are counted and written down
    CKPT_FAILPOINT="rename_new:nth=2:rank=1:action=kill"         several are separated by ";"

The first word is an operation of `FsOps` by name, or `any` for every one that changes something. Which one:
`nth=2` the second, `from=2` the second and all later ones, neither: all. Only those count that match `rank=` (of the
environment variable RANK), `process=trainer` or `writer`, and `path=` (a part of the path). What happens instead of
the operation or before it, by `action=`, which comes last:

    kill          SIGKILL to the process            raise:ENOSPC  OSError with this errno; a close closes all the same
    stop          SIGSTOP to the process            sleep:5       seconds, then the operation
    skip          nothing at all (not for an open) short         a write that takes half of its bytes at first
    torn          half of a write, then SIGKILL
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from ..errors import CheckpointError
from ..storage.file_system import SPEC

#: Every operation that changes something, in the order of `FsOps`.
EFFECTS = (
    "make_folder",
    "create",
    "open_direct",
    "open_over",
    "link",
    "write",
    "truncate",
    "sync",
    "close",
    "sync_folder",
    "rename_new",
    "replace",
    "unlink",
    "remove_folder",
)
#: Those that only look: they can fail by name, and are not part of the count.
LOOKS = ("names", "size", "modified", "read", "flock")
_ACTIONS = ("kill", "stop", "skip", "torn", "short")


class FailpointError(CheckpointError, ValueError):
    """`CKPT_FAILPOINT` cannot be understood; the text says which part of it."""


@dataclass(frozen=True)
class Failpoint:
    """One place to fail, and how; see the top of this file.

    Attributes:
        operation: of `EFFECTS` or `LOOKS`, or `any`.
        action: what happens.
        argument: its errno by name, or its seconds.
        first: number of the first match, from 1, that counts.
        last: number of the last one; None: all that follow.
        rank: which rank, or None.
        process: `trainer`, `writer`, or None.
        path: a part of the path.
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
        """Whether an operation is one of those that this failpoint counts."""
        named = operation == self.operation or (self.operation == "any" and operation in EFFECTS)
        return (
            named
            and self.rank in (None, rank)
            and self.process in (None, process)
            and (not self.path or self.path in path)
        )


def parse_failpoints(text: str) -> list[Failpoint]:
    """The failpoints of `CKPT_FAILPOINT`.

    Raises:
        FailpointError: naming the part that is wrong.
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
        values[key] = value
    kind, _, argument = action.partition(":")
    valid = action in _ACTIONS
    if kind == "raise":
        valid = isinstance(getattr(errno, argument, None), int)  # some have two names, and `errorcode` one
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
