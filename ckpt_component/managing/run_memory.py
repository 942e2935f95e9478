"""What keepers of this host have of a run's folder: the snapshots of the run that owns it, and those of stale runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from ..core.commit.fencing import read_owner
from ..core.storage.memory.keeper_sockets import memory_root, tokens_of
from ..core.storage.memory.remote_keeper import RemoteKeeper, keepers_of
from .run_context import RunContext

logger = logging.getLogger(__name__)


class RunMemory:
    """The snapshots in memory that a run may begin with. Used on the leading rank alone.

    Args:
        run: the run
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        #: The keepers that are to stay until this run has a snapshot of its own.
        self._held: list[RemoteKeeper] = []

    def of_owner(self) -> RunContext | None:
        """The memory of the run that owns the folder; None: it has no keepers here. Keepers of other runs are stale.

        From now on its keepers stay longer than their lease, until `let_go`, or the end of this process.

        Raises:
            CheckpointError, OSError: the owner cannot be read, or a keeper does not answer
        """
        owner = read_owner(self._run.fs, self._run.root)
        if owner is None or owner.token not in tokens_of(self._run.root):
            return None
        root = memory_root(self._run.root, owner.token)
        self.let_go()
        self._held = keepers_of(root)
        for keeper in self._held:
            with contextlib.suppress(ConnectionError):  # it has ended since it was found
                keeper.hold()
        return replace(self._run, fs=self._run.elsewhere(root), root=root, remote=None, memory=None)

    def let_go(self) -> None:
        """Let the keepers end when their lease is over."""
        while self._held:
            self._held.pop().close()

    def drop(self, path: str) -> None:
        """Delete a snapshot from all keepers that have a part of it.

        Raises:
            OSError: a keeper does not answer
        """
        for keeper in _closing(keepers_of(path)):
            keeper.delete([file.path for file in keeper.listed(path)])

    def end_others(self) -> None:
        """End the keepers of all other runs of the folder: this one has a snapshot of its own. Failures are logged."""
        self.let_go()
        for token in tokens_of(self._run.root):
            if token != self._run.events.run:
                try:
                    for keeper in _closing(keepers_of(memory_root(self._run.root, token))):
                        keeper.end()
                except OSError as error:
                    logger.warning("a keeper of run %s, which is over, ends with its lease: %s", token, error)


def _closing(keepers: list[RemoteKeeper]) -> Iterator[RemoteKeeper]:
    """Each keeper that is still there; closes all of them."""
    try:
        for keeper in keepers:
            with contextlib.suppress(ConnectionError):
                yield keeper
    finally:
        for keeper in keepers:
            keeper.close()
