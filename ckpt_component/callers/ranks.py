"""Which ranks there are, and the agreement of a caller or queue with those of the others. Imports no torch."""

from __future__ import annotations

import weakref
from typing import Any

from ..coordination.rank_store import RankStore, distributed
from .agreement import Agreement


def rank() -> int:
    """Which one this is."""
    dist = distributed()
    return 0 if dist is None else int(dist.get_rank())


class Ranks:
    """The other ranks, as one caller or queue sees them: nobody, until it is used where there are several."""

    def __init__(self) -> None:
        self._agreement: Agreement | None = None
        self._group: weakref.ref[Any] | None = None  # weak, so that destroy_process_group() is not held up

    def agreement(self) -> Agreement | None:
        """The agreement with the ranks of the present default group; None where there is one rank.

        All ranks must ask for it in the same order. It holds until there is another default group.
        """
        dist = distributed()
        group = None if dist is None else dist.group.WORLD
        known = None if self._group is None else self._group()
        if group is not known or group is None:
            self._agreement, self._group = None, None
            store = RankStore.of_job("callers")
            if store is not None:
                self._agreement = Agreement(store)
            self._group = None if group is None else weakref.ref(group)
        return self._agreement

    @property
    def current(self) -> Agreement | None:
        """The agreement of the last schedule, if any."""
        return self._agreement

    def rest(self) -> None:
        """Nothing is at work any more; see `Agreement.rest`."""
        if self._agreement is not None:
            self._agreement.rest()
