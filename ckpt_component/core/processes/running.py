"""Processes by what stays the same: which one owns an object after a fork, and whether one of a name still runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...errors import CheckpointError
from ..outside import OUTSIDE, Outside

#: How Python refuses work for the threads of an executor, and from 3.12 on a new thread, while the interpreter ends.
_ENDS = ("cannot schedule new futures after", "can't create new thread at interpreter shutdown")
#: Says so in words.
ENDING = (
    "Nothing is saved or loaded any more, because the interpreter is ending; join the threads that do so before the "
    "script ends."
)


class OwnerProcess:
    """The process that built an object. In a forked child, the copy of the object must leave alone what it owns.

    Args:
        what: what the object is, for an error: `manager`
        outside: of the process

    Attributes:
        closed: whether the object is closed; its `close` sets it
    """

    def __init__(self, what: str, outside: Outside = OUTSIDE) -> None:
        self._what = what
        self._outside = outside
        self._pid = outside.pid()
        self.closed = False

    @property
    def is_here(self) -> bool:
        """Whether this process is the one."""
        return self._outside.pid() == self._pid

    def check(self, *, may_be_closed: bool = False) -> None:
        """Check that this process is the one, and that the object is not closed.

        Args:
            may_be_closed: let it be closed, as for what only waits

        Raises:
            CheckpointError: it is another, or the object is closed
        """
        if self._outside.pid() != self._pid:
            raise CheckpointError(
                f"This {self._what} belongs to process {self._pid}; build one after the fork (docs/failures.md#forks)."
            )
        if self.closed and not may_be_closed:
            raise CheckpointError(f"This {self._what} is closed; build a new one.")


def refuse_at_exit(error: BaseException) -> None:
    """Say in words why a thread was refused, if it is because the interpreter ends.

    Python says so in the text of its error alone: `sys.is_finalizing()` is false while atexit handlers run.

    Args:
        error: what was raised where a thread was to start, or to take work

    Raises:
        CheckpointError: it is so
    """
    if str(error).startswith(_ENDS):
        raise CheckpointError(ENDING) from error


_KEY = re.compile(r"([0-9a-f]*)-(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ProcessName:
    """One process, as a file names it.

    Attributes:
        host: name of its host
        pid: its process ID
        space: identifies the processes that it sees: of one boot of one host, in one container; empty: unknown
        started: when it started, in clock ticks since that boot; 0: unknown
        outside: of the process that asks whether it is running
    """

    host: str
    pid: int
    space: str = ""
    started: int = 0
    outside: Outside = field(default=OUTSIDE, compare=False, repr=False)

    @classmethod
    def current(cls, outside: Outside = OUTSIDE) -> ProcessName:
        """This process."""
        pid = outside.pid()
        return cls(outside.host_name(), pid, outside.space(), outside.started(pid) or 0, outside)

    @classmethod
    def of_key(cls, key: str, outside: Outside = OUTSIDE) -> ProcessName | None:
        """The process of this host whose `key` this is; None: it is not a key. An early key has no start time."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        return cls(outside.host_name(), int(match[2]), match[1], int(match[3] or 0), outside)

    @property
    def key(self) -> str:
        """Names the process within its host, as part of a file's name."""
        return f"{self.space}-{self.pid}-{self.started}"

    @property
    def running(self) -> bool | None:
        """Whether it is running; None: unknown, because it is not seen from here, or not fully named."""
        outside = self.outside
        if not self.space or self.pid < 1 or self.host != outside.host_name() or self.space != outside.space():
            return None
        if not outside.is_running(self.pid):
            return False
        try:
            started = outside.started(self.pid)
        except OSError:
            return None  # /proc hides the processes of other users
        if started is None or (self.started and started != self.started):
            return False
        return True if self.started else None
