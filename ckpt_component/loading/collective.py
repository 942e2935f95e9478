"""Load on several ranks together: a phase of a load ends on all of them, or fails on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..core.coordination import Coordinator
from ..core.formats.index import Index
from ..core.options import ResolvedTimeouts
from ..core.storage.file_set import FileSet
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    describe_error,
)

#: Opens the files of a folder.
OpenFiles = Callable[[str], FileSet]
#: Makes the context of a phase of a load, by the phase's name.
Phase = Callable[[str], contextlib.AbstractContextManager[object]]

#: The types in which a failure reaches the other ranks, the worst first. The first two allow an older checkpoint.
_KINDS: tuple[type[CheckpointError], ...] = (
    CheckpointCorruptError,
    CheckpointUnreadableError,
    CheckpointNotFoundError,
    CheckpointLoadError,
)


class CollectiveLoad:
    """One load that every rank makes.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: `stage` is for all ranks to begin; with `write`, it is for the slowest to finish a phase
        about: distinguishes this load from one that a rank made by itself before
        tag: names its questions; None: the ranks meet in its first phase
        name: the method that was called
    """

    def __init__(
        self,
        ranks: Coordinator,
        timeouts: ResolvedTimeouts,
        about: str,
        tag: str | None = None,
        name: str = "load",
    ) -> None:
        self._ranks = ranks
        self._timeouts = timeouts
        self._about = about
        self._tag = tag
        self._name = name

    def opens(self, open_files: OpenFiles, index: Index, verified: bool) -> OpenFiles:
        """What opens the files of the checkpoint for its reads.

        Args:
            open_files: opens them for this rank alone, see `Storage.open_files`
            index: the checkpoint
            verified: whether what is read is compared with checksums of the checkpoint
        """
        return open_files

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Do this rank's part of a phase, then wait for the others.

        Args:
            name: the phase; every rank has the same ones in the same order

        Raises:
            CheckpointError: what the worst failure says, with its rank, if it was on another rank; else the failure
                of this rank, as it is
            CheckpointTimeoutError: a rank did not make the call, or did not finish the phase in time
            RanksError: a rank is dead, or has gone on without the call
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        outcome = None if failure is None else _outcome_of(failure)
        try:
            worst = self._agree(name, outcome)
        except CheckpointError as error:
            raise error from failure
        if worst is None:
            return
        kind, rank, text = worst
        if failure is not None and outcome is not None and outcome[0] == kind:
            raise failure
        raise _KINDS[kind](f"Rank {rank}: {text}") from failure

    def decide(self, name: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Between two phases: what the leading rank makes of the values of all ranks.

        Args:
            name: the question
            value: this rank's value
            decide: called on the leading rank, with all values by rank

        Raises:
            CheckpointTimeoutError, RanksError: a rank did not answer in time, or is dead
        """
        timeouts = self._timeouts
        deadline = self._ranks.outside.now() + timeouts.stage + timeouts.write
        return self._ranks.decide(f"{self._tag}/{name}", value, decide, deadline)

    def _agree(self, phase: str, outcome: tuple[int, str] | None) -> Any:
        """The worst outcome of all ranks, with its rank."""
        now, timeouts = self._ranks.outside.now(), self._timeouts
        if self._tag is not None:
            deadline = now + timeouts.stage + timeouts.write
            return self._ranks.decide(f"{self._tag}/{phase}", outcome, _worst_of, deadline)
        call = f"{self._name} without alone=True"  # what a rank that waits says that the others have not called
        worst = self._ranks.meet(call, outcome, _worst_of, now + timeouts.stage, self._about)
        self._tag = f"{self._name}/{self._ranks.meetings[call]}"
        return worst


class CollectiveLoads:
    """Makes the loads that all ranks make.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: as for `CollectiveLoad`
    """

    def __init__(self, ranks: Coordinator, timeouts: ResolvedTimeouts) -> None:
        self._ranks = ranks
        self._timeouts = timeouts

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        """The next load; arguments as for `CollectiveLoad`."""
        return CollectiveLoad(self._ranks, self._timeouts, about, tag, name)

    def close(self) -> None:
        """Close what loads have left open for those that follow. Safe to call twice."""


def _outcome_of(failure: Exception) -> tuple[int, str]:
    """How bad a failure is, by the number of its kind, and its text."""
    kinds = (CheckpointUnreadableError, CheckpointCorruptError, CheckpointNotFoundError)  # the first is a second too
    kind = next((each for each in kinds if isinstance(failure, each)), CheckpointLoadError)
    return _KINDS.index(kind), str(failure) if isinstance(failure, CheckpointError) else describe_error(failure)


def _worst_of(outcomes: list[Any]) -> tuple[int, int, str] | None:
    """On the leading rank: the worst failure, with its rank, if there is one."""
    failures = [(outcome[0], rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome is not None]
    return min(failures, default=None)
