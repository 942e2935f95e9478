"""What keepers on all hosts of a job have of a run's folder.

The first rank of each host offers the keepers that it finds there, and has them stay. The leading rank looks through
all of them, and its answer says to all ranks where the others are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.commit.scan import Scan
from ..core.storage.memory.job_keepers import JobKeepers
from ..core.storage.memory.keeper_sockets import split_root
from ..core.storage.memory.keepers import Keeper
from ..core.storage.memory.peer_sockets import PeerAddress
from ..core.storage.memory.remote_keeper import each_of, keepers_of
from .run_context import RunContext
from .run_memory import RunMemory

logger = logging.getLogger(__name__)


class PeerMemory(RunMemory):
    """See the top of this file.

    Args:
        run: the run
        lineage: as for `RunMemory`
        keepers: finds keepers for the loads of this rank; is told where they are
    """

    def __init__(self, run: RunContext, lineage: Sequence[str], keepers: JobKeepers) -> None:
        super().__init__(run, lineage)
        self._keepers_of_job = keepers
        self._leads_host = run.hosts.leads(run.ranks.rank)
        #: On the leading rank, by the token of a run: its secret, and where its keepers are.
        self._offered: dict[str, list[Any]] = {}
        #: The same, the path of its memory.
        self._roots: dict[str, str] = {}

    def offer(self) -> Any:
        """The keepers on this host, each with its run's token, memory and secret, and its address."""
        if not self._leads_host:
            return []
        try:
            return [*self._here()]
        except OSError as error:
            logger.warning("snapshots in this host's memory cannot be used: %s", error)
            return []

    def _here(self) -> Iterator[list[Any]]:
        outside = self._run.ranks.outside
        for token in dict.fromkeys([self._run.events.run, *self._lineage]):
            kept = self._kept(token)
            for keeper in each_of([] if kept is None else keepers_of(kept.memory, outside)):
                with contextlib.suppress(ConnectionError):  # it has ended
                    about = keeper.about()
                    peer = about.get("peer")
                    if peer is not None and kept is not None:  # else it has had nothing to send
                        place = PeerAddress(about["host"], peer["address"], peer["port"], keeper.rank)
                        yield [token, kept.memory, about["secret"], place]

    def look(self, offers: Sequence[Any]) -> tuple[RunContext, Scan] | None:
        """See the base class; with the keepers of all hosts."""
        self._offered.clear()
        for token, memory, secret, place in (each for offer in offers for each in offer):
            self._roots[token] = memory
            self._offered.setdefault(token, [secret]).append(place)
        return super().look(offers)

    def _look(self) -> tuple[RunContext, Scan] | None:
        for token, keepers in self._offered.items():
            self._know(token, keepers)
        return super()._look()

    def elsewhere(self, root: str) -> Sequence[Any]:
        """See the base class. First the secret of the run, once, as all ranks hear of it."""
        return self._offered.get(_token_of(root), ())

    def join(self, root: str, keepers: Sequence[Any]) -> None:
        """See the base class; the first rank of a host has its keepers stay."""
        if self._run.ranks.is_leader:
            return  # it has looked
        self.let_go()
        if not root:
            return
        self._know(_token_of(root), keepers)
        if self._leads_host:
            try:
                self._hold(root)
            except OSError as error:
                logger.warning("snapshots in this host's memory may go with their lease: %s", error)

    def _know(self, token: str, keepers: Sequence[Any]) -> None:
        for place in keepers[1:]:
            self._keepers_of_job.know(token, keepers[0], PeerAddress(*place))

    def let_go(self) -> None:
        """See the base class; loads find keepers on this host alone then."""
        super().let_go()
        self._keepers_of_job.forget()

    def _memory_of(self, token: str) -> str | None:
        here = super()._memory_of(token)
        return self._roots[token] if here is None and token in self._offered else here

    def _keepers(self, path: str) -> Iterable[Keeper]:
        return self._keepers_of_job(path)


def _token_of(root: str) -> str:
    place = split_root(root)
    return "" if place is None else place[1]
