"""What keepers have of a run's folder: the snapshots of the run that owns it, and those of stale runs.

The owner file in the folder names these runs, so that they are found whatever the path of the folder is, or was.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..core.commit.fencing import is_copy, read_owner
from ..core.commit.liveness import living_marks, marking_process
from ..core.commit.scan import Scan
from ..core.storage.memory.keeper_sockets import memory_root, tokens_at
from ..core.storage.memory.keepers import Keeper
from ..core.storage.memory.kept_runs import KeptRun, kept_run
from ..core.storage.memory.remote_keeper import RemoteKeeper, each_of, keepers_of
from ..errors import CheckpointError
from .run_context import RunContext

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class RunMemory:
    """The snapshots in this host's memory that a run may begin with. `PeerMemory` also knows of those on other hosts.

    The leading rank looks; the others only offer, join and let go.

    Args:
        run: the run
        lineage: tokens of the runs that have owned the folder so far, the last one first; the same on all ranks
    """

    def __init__(self, run: RunContext, lineage: Sequence[str]) -> None:
        self._run = run
        self._lineage = lineage
        #: The keepers that are to stay until this run has a snapshot of its own, and what they have.
        self._held: list[RemoteKeeper] = []
        self._found: tuple[RunContext, Scan] | None = None
        #: The runs that owned the folder after the one whose snapshots were found.
        self._later = set[str]()
        #: Whether the others were ended.
        self._is_first = False

    def offer(self) -> Any:
        """What this rank tells the leading one, as JSON values."""

    def join(self, root: str, keepers: Sequence[Any]) -> None:
        """Use what the leading rank has found, on this rank too.

        Args:
            root: of the snapshots in memory; empty: there are none
            keepers: what `elsewhere` has said
        """

    def elsewhere(self, root: str) -> Sequence[Any]:
        """On the leading rank: where the keepers of a root are that other hosts have, as JSON values."""
        return ()

    def look(self, offers: Sequence[Any]) -> tuple[RunContext, Scan] | None:
        """What the keepers of the run that owns the folder have; None: nothing. Keepers of other runs are stale.

        From now on they stay longer than their lease, until `let_go`, or the end of this process. First waits for a
        snapshot that they are still completing. What else is in memory than whole snapshots goes with its keepers, and
        nobody need hear of it.

        Args:
            offers: those of all ranks
        """
        self.let_go()
        try:
            self._found = self._look()
        except (CheckpointError, OSError) as error:
            logger.warning("snapshots in memory cannot be used, so %s decides: %s", self._run.roots, error)
            self.let_go()
        return self._found

    def is_stale(self, scan: Scan) -> bool:
        """Whether a later run than that of the snapshots has saved checkpoints, so that they are of no use any more.

        Args:
            scan: of the folder, and of the permanent one behind it
        """
        return any(manifest.get("run") in self._later for manifest in scan.manifests.values())

    def _look(self) -> tuple[RunContext, Scan] | None:
        owner = read_owner(self._run.fs, self._run.root)
        lineage = () if owner is None else owner.lineage
        for token in sorted(
            {*tokens_at(self._run.root, self._run.ranks.outside)}.difference(lineage, [self._run.events.run])
        ):
            why = "no owner file" if owner is None else f"another owner ({owner})"
            text = "snapshots of run %s in memory are not used: %s has %s"
            logger.info(text, token, self._run.root, why)
        self._later.clear()
        # A run that took the folder and died before its first snapshot was whole has left that of the run before it.
        for token in lineage:
            root = self._memory_of(token)
            if root is not None and (found := self._of(root))[1].committed:
                return found
            self._later.add(token)
        if owner is not None and owner.alive is False and not owner.released:
            text = "no snapshot of the last run (%s) is in memory: none was whole, or checkpoint.recovery.lease is over"
            logger.info(text, owner)
        return None

    def _memory_of(self, token: str) -> str | None:
        """The path of the memory of a run that owns the folder, or did; None: it has no keepers."""
        kept = self._kept(token)
        return None if kept is None else kept.memory

    def _kept(self, token: str) -> KeptRun | None:
        """A run that owns the folder, or did, with keepers on this host; not one of whose folder this one is a copy."""
        run = self._run
        kept = kept_run(token, run.ranks.outside)
        here = run.fs.here(run.root)
        if kept is None or not is_copy(here, kept.folder, token, run.elsewhere):
            return kept
        text = "%s is a copy of %s, so what is in memory of it is not used here"
        logger.info(text, here, kept.folder)
        return None

    def _hold(self, root: str) -> None:
        """Have this host's keepers of a root stay from now on."""
        for keeper in keepers_of(root, self._run.ranks.outside):
            self._held.append(keeper)
            with contextlib.suppress(ConnectionError):  # it has ended since it was found
                keeper.hold()

    def _of(self, root: str) -> tuple[RunContext, Scan]:
        """What the keepers of a run have, which stay from now on."""
        run = self._run
        self._hold(root)
        kept = replace(run, fs=run.elsewhere(root), root=root, remote=None, memory=None)
        self._await_snapshot(kept)
        scan = kept.scan()
        return kept, Scan(scan.committed, metrics=scan.metrics, manifests=scan.manifests)

    def _await_snapshot(self, kept: RunContext) -> None:
        """Wait, for `timeouts.close`, for the processes that still write a snapshot of a run, or decide on one.

        An attempt without a mark has nobody who would complete it: its keeper has died, or follows a decision.
        """
        outside, limit = kept.ranks.outside, kept.timeouts.close
        until, names = outside.now() + limit, ""
        with outside.waits.on(lambda: f"a snapshot in memory that {names} completes", until) as wait:
            while marks := living_marks(kept.fs, kept.root):
                names = ", ".join(sorted({_process_text(mark) for mark in marks}))
                if outside.now() > until:
                    text = "%s did not complete a snapshot in memory in %g s (timeouts.close); continuing without it"
                    logger.warning(text, names, limit)
                    return
                wait.look()
                outside.sleep(_POLL_SECONDS)

    def let_go(self) -> None:
        """Let the keepers end when their lease is over."""
        self._found = None
        while self._held:
            self._held.pop().close()

    def drop(self, path: str) -> None:
        """Delete a snapshot from all keepers that have a part of it. A failure is logged."""
        try:
            for keeper in self._keepers(path):
                with contextlib.suppress(ConnectionError):  # it has ended
                    keeper.delete([file.path for file in keeper.listed(path)])
        except OSError as error:
            logger.warning("%s could not be dropped from memory: %s", path, error)

    def _keepers(self, path: str) -> Iterable[Keeper]:
        """The keepers that may have a part of a snapshot."""
        return each_of(keepers_of(path, self._run.ranks.outside))

    def drop_after(self, step: int | None) -> None:
        """Delete the snapshots of steps that follow this one; None: all."""
        kept, scan = self._found or (self._run, Scan())
        for later in scan.committed:
            if step is None or later > step:
                self.drop(kept.path_of(later))
                logger.info("dropped step %d from memory (checkpoint.rewind=true)", later)

    def end_others(self) -> None:
        """End the keepers of the runs before in the folder, as this one has a snapshot of its own. Failures are logged.

        Sockets that dead keepers of any run have left there go, too. A second call does nothing: a run that was
        suspended may be stale itself when it goes on.
        """
        if self._is_first:
            return
        self._is_first = True
        self.let_go()
        outside = self._run.ranks.outside
        for token in self._lineage:
            try:
                kept = None if token == self._run.events.run else self._kept(token)
                for keeper in each_of([] if kept is None else keepers_of(kept.memory, outside)):
                    with contextlib.suppress(ConnectionError):  # it has ended
                        keeper.end()
            except OSError as error:
                logger.warning("a keeper of run %s, which is over, ends with its lease: %s", token, error)
        try:
            for token in tokens_at(self._run.root, outside):
                if token not in (self._run.events.run, *self._lineage):
                    for _ in each_of(keepers_of(memory_root(self._run.root, token), outside)):
                        pass  # it is connected to, which removes the sockets of the dead
        except OSError as error:
            logger.info("sockets of dead keepers may stay: %s", error)


def _process_text(mark: str) -> str:
    process = marking_process(mark)
    return mark if process is None else f"process {process.pid}"
