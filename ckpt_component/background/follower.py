"""`Follower`: what works with the checkpoints of a run beside it, such as uploads and exports."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..events import SaveReport


class Follower(ABC):
    """Called by a run where something becomes of its checkpoints. It works in a process of its own; no call waits.

    A failure never stops training, unless `check` raises.
    """

    def start(self, step: int = 0) -> None:
        """The run has begun after `step`."""

    def check(self) -> None:
        """Before a save: raise what must fail it."""

    def on_commit(self, report: SaveReport) -> None:
        """A checkpoint was committed. Called on the leading rank, on the save thread."""

    def on_kept(self, report: SaveReport) -> None:
        """A snapshot is whole in memory; its path is there. Called on the leading rank, on the thread of that lane."""

    def in_use(self) -> set[str]:
        """The paths of checkpoints that must not be deleted now."""
        return set()

    @abstractmethod
    def end(self, *, finish: bool) -> None:
        """The run has ended; the one call that may wait, for a bounded time.

        Args:
            finish: it has come to its end, so what is left to do is done
        """
