"""Which ranks there are, and the agreement of a caller or queue with those of the others. Imports no torch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from ..coordination.rank_store import RankStore, distributed
from .agreement import Agreement
from .ballots import Place


def rank() -> int:
    """Which one this is."""
    dist = distributed()
    return 0 if dist is None else int(dist.get_rank())


class Ranks:
    """The other ranks, as one caller or queue sees them: nobody, until it is used where there are several."""

    _all: ClassVar[weakref.WeakSet[Ranks]] = weakref.WeakSet()
    _numbers: ClassVar[Iterator[int]] = itertools.count()
    #: By default group, the numbers of those that were used together with other ranks.
    _joined: ClassVar[weakref.WeakKeyDictionary[Any, list[int]]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._number = next(Ranks._numbers)
        self._agreement: Agreement | None = None
        self._group: weakref.ref[Any] | None = None  # weak, so that destroy_process_group() is not held up
        Ranks._all.add(self)

    def agreement(self) -> Agreement | None:
        """The agreement with the ranks of the present default group; None where there is one rank.

        It holds until there is another default group. Those of the ranks belong together in the order in which they
        are first used together.
        """
        dist = distributed()
        group = None if dist is None else dist.group.WORLD
        known = None if self._group is None else self._group()
        if group is not known or group is None:
            self._agreement, self._group = None, None
            store = RankStore.shared("callers")
            if store is not None:
                self._agreement = Agreement(store, partial(Ranks._place, self._number, weakref.ref(group)))
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

    @staticmethod
    def _place(number: int, group: weakref.ref[Any]) -> Place:
        """Where a caller stands among those of its rank, now that it is used together with other ranks.

        Ranks make their callers in the same order, so they must come to the same, unless they use them in different
        orders. A rank may have callers that it uses alone, and these say nothing about the others.
        """
        waiting = [
            ranks._number
            for ranks in tuple(Ranks._all)
            if ranks._number != number and ranks._group == group and ranks._agreement and ranks._agreement.waits
        ]
        joined = Ranks._joined.setdefault(group(), [])
        passed = sum(other > number for other in joined)
        joined.append(number)
        return passed, sum(other < number for other in waiting), len(waiting)
