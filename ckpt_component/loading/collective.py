"""Load on several ranks together: a phase of a load ends on all of them, or fails on all of them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from ..core.coordination import Coordinator
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
from ..formats.index import Index

#: Opens the files of a folder.
OpenFiles = Callable[[str], FileSet]
#: Makes the context of a phase of a load, by the phase's name.
Phase = Callable[[str], contextlib.AbstractContextManager[object]]

#: The phases in which ranks read.
READING = ("compare", "read")
#: The types in which a failure reaches the other ranks, the worst first. The first two allow an older checkpoint.
_KINDS: tuple[type[CheckpointError], ...] = (
    CheckpointCorruptError,
    CheckpointUnreadableError,
    CheckpointNotFoundError,
    CheckpointLoadError,
)


class SharedReads(ABC):
    """Lets the ranks of several hosts read together: each byte that several of them want is read by one."""

    @abstractmethod
    def opens(self, tag: str, open_files: OpenFiles, index: Index, verified: bool) -> OpenFiles:
        """See `CollectiveLoad.opens`; the tag is that of the load, for questions to the other ranks."""

    @abstractmethod
    def end_reads(self, tag: str) -> None:
        """This rank has read in a phase of a load, or has failed: take part in what others still read together."""

    @abstractmethod
    def close(self) -> None:
        """End all connections. Safe to call twice."""


class CollectiveLoad:
    """One load that every rank makes.

    Args:
        loads: makes it, and knows the hosts
        ranks: the ranks, which make their loads in the same order
        timeouts: `stage` is for all ranks to begin; with `write`, it is for the slowest to finish a phase
        about: distinguishes this load from one that a rank made by itself before
        tag: names its questions; None: the ranks meet in its first phase
        name: the method that was called
    """

    def __init__(
        self,
        loads: CollectiveLoads,
        ranks: Coordinator,
        timeouts: ResolvedTimeouts,
        about: str,
        tag: str | None = None,
        name: str = "load",
    ) -> None:
        self._loads = loads
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
        shared = self._loads.shared
        return open_files if shared is None else shared.opens(str(self._tag), open_files, index, verified)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Do this rank's part of a phase, then wait for the others.

        Args:
            name: the phase; every rank has the same ones in the same order

        Raises:
            CheckpointError: what the worst failure says, with its rank, if it was on another rank; else the failure
                of this rank, as it is
            CheckpointTimeoutError: a rank did not make the call, or did not finish the phase in time
            RanksError: a rank is dead, or has continued without the call
        """
        if self._loads.asks_hosts:
            self._loads.share(self._ask("hosts", self._ranks.outside.host_name(), _are_several))
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        outcome = None if failure is None else _outcome_of(failure)
        try:
            if name in READING and self._loads.shared is not None:
                self._loads.shared.end_reads(str(self._tag))
            worst = self._ask(name, outcome, _worst_of)
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

    def _ask(self, question: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """The same, for the first question of a load, too: a rank that alone has made the call gets an error early."""
        now, timeouts = self._ranks.outside.now(), self._timeouts
        if self._tag is not None:
            deadline = now + timeouts.stage + timeouts.write
            return self._ranks.decide(f"{self._tag}/{question}", value, decide, deadline)
        call = f"{self._name} without alone=True"  # what a rank that waits says that the others have not called
        decision = self._ranks.meet(call, value, decide, now + timeouts.stage, self._about)
        self._tag = f"{self._name}/{self._ranks.meetings[call]}"
        return decision


class CollectiveLoads:
    """Makes the loads that all ranks make.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: as for `CollectiveLoad`
        sharing: makes what lets ranks on several hosts read together; None: each of them reads all that it wants
        several: whether there are several hosts; None: the ranks ask each other at the first load

    Attributes:
        shared: what `sharing` has made; None: nothing is read together
        asks_hosts: whether it is yet to be asked whether there are several hosts
    """

    def __init__(
        self,
        ranks: Coordinator,
        timeouts: ResolvedTimeouts,
        sharing: Callable[[Coordinator, ResolvedTimeouts], SharedReads] | None = None,
        several: bool | None = None,
    ) -> None:
        self._ranks = ranks
        self._timeouts = timeouts
        self._sharing = sharing
        self.shared: SharedReads | None = None
        self.asks_hosts = sharing is not None and several is None
        if several:
            self.share(True)

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        """The next load; arguments as for `CollectiveLoad`."""
        return CollectiveLoad(self, self._ranks, self._timeouts, about, tag, name)

    def share(self, several: bool) -> None:
        """Let the ranks read together from now on if they are on several hosts."""
        self.asks_hosts = False
        if several and self._sharing is not None:
            self.shared = self._sharing(self._ranks, self._timeouts)

    def close(self) -> None:
        """Close what loads have left open for those that follow. Safe to call twice."""
        if self.shared is not None:
            self.shared.close()


def _outcome_of(failure: Exception) -> tuple[int, str]:
    """How bad a failure is, by the number of its kind, and its text."""
    kinds = (CheckpointUnreadableError, CheckpointCorruptError, CheckpointNotFoundError)  # the first is a second too
    kind = next((each for each in kinds if isinstance(failure, each)), CheckpointLoadError)
    return _KINDS.index(kind), str(failure) if isinstance(failure, CheckpointError) else describe_error(failure)


def _are_several(names: list[Any]) -> bool:
    """On the leading rank: whether the ranks are on several hosts."""
    return len({*names}) > 1


def _worst_of(outcomes: list[Any]) -> tuple[int, int, str] | None:
    """On the leading rank: the worst failure, with its rank, if there is one."""
    failures = [(outcome[0], rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome is not None]
    return min(failures, default=None)
