"""Where and how long an object may be used: in the process that built it, until it is closed or the interpreter ends.

A fork copies the object without its threads, and shares its sockets.
"""

from __future__ import annotations

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
