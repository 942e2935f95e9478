"""Which process an object belongs to: a fork copies the object without its threads, and shares its sockets."""

from __future__ import annotations

import os

from ...errors import CheckpointError


class HomeProcess:
    """The process that built an object. In a forked child, the copy of the object must leave alone what it owns.

    Args:
        what: what the object is, for an error: `manager`
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the one."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Check that this process is the one.

        Raises:
            CheckpointError: it is another
        """
        if not self.is_here:
            raise CheckpointError(
                f"This {self._what} belongs to process {self._pid}; build one after the fork (docs/failures.md#forks)."
            )
