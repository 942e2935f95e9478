"""Signs of life between callers: who waits for a rank, however long it is busy, learns when it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable

from ..coordination.heartbeat import Heartbeat, Watch
from ..coordination.rank_store import RankStore
from ..errors import CheckpointError

logger = logging.getLogger(__name__)

#: Without a sign of life for so long, a rank is gone.
_HEARTBEAT_SECONDS = 30.0
#: In place of a sign of life: none is to be expected.
_RESTING = b"[0, 0]"


class Life:
    """This rank's signs of life, while others may wait for it, and a look at theirs.

    Rank 0 watches all others, and they watch it. A heart that nobody stopped stops when this is collected. The callers
    of a rank have one key for their signs: it is the process that lives, whichever of them says so.

    Args:
        store: that all callers of the job share.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._beats = store.clone()
        self._hearts: list[Heartbeat] = []
        self._watch: Watch | None = None
        # At the exit of the interpreter no more than that: the process is gone then, which others have to notice.
        weakref.finalize(self, _stop, self._hearts, os.getpid())
        weakref.finalize(self, _rest, self._hearts, self._beats, os.getpid()).atexit = False  # else before the above

    def begin(self) -> None:
        """Give signs from now on."""
        if not self._hearts:
            others = range(1, self._store.world_size) if self._store.rank == 0 else [0]
            self._watch = Watch(self._store, others, _HEARTBEAT_SECONDS, None)
            heart = Heartbeat(self._beats, lambda: [0], _HEARTBEAT_SECONDS)
            self._hearts.append(heart)
            heart.__enter__()

    def rest(self) -> None:
        """Give no more signs, and say so, until `begin`."""
        self._watch = None
        _rest(self._hearts, self._beats, os.getpid())

    def lost(self, missing: Callable[[], list[int]]) -> dict[int, str]:
        """Which of the missing ranks are gone, and what is to say about them. One that has yet to begin is late.

        Raises:
            RanksError: this rank itself could give no sign of life, so that others take it for lost.
        """
        for heart in self._hearts:
            heart.check()

        def lived() -> list[int]:
            return [number for number in missing() if self._store.peek(f"beat/{number}") not in (None, _RESTING)]

        return {} if self._watch is None else self._watch.lost(lived)


def _stop(hearts: list[Heartbeat], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy, without the thread
    while hearts:
        with contextlib.suppress(RuntimeError):  # collected in the heart's own thread, which cannot join itself
            hearts.pop().__exit__(None, None, None)


def _rest(hearts: list[Heartbeat], beats: RankStore, owner: int) -> None:
    if os.getpid() != owner or not hearts:
        return
    _stop(hearts, owner)
    try:
        # Not removed: a store that is asked for a key that vanishes at this moment waits for it.
        beats.set(f"beat/{beats.rank}", _RESTING)
    except CheckpointError as error:
        logger.debug("%s", error)
