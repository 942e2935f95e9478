"""Heartbeats: a rank that waits for another can see whether that one has died, and where it is in its run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...errors import CheckpointError, CheckpointTimeoutError, RanksError, ranks_failed
from .rank_store import RankStore

logger = logging.getLogger("ckpt_component.coordination")

_BEAT_SECONDS = 2.0
#: Replaces the heartbeat of a rank that sends none for now and is not to be considered dead.
RESTING = b"[0, -1]"
#: Seconds before the first look at the heartbeats of those that are waited for.
_LOOK_SECONDS = 1.0
#: Seconds between attempts once the other ranks consider this one dead.
_LATE_PAUSE = 30.0
#: Seconds for which the last heartbeat waits for one in progress.
_END_SECONDS = 1.0


class Place(NamedTuple):
    """Where a rank is in its run.

    Attributes:
        turn: how often the rank has gone back to an earlier step
        step: the last training step that it reported; None: none yet
        closed: whether its manager is closed
    """

    turn: int = 0
    step: int | None = None
    closed: bool = False

    def at(self, step: int) -> Place:
        """The place of the same rank at this step."""
        step = int(step)  # for JSON
        return Place(self.turn + (self.step is not None and step < self.step), step)

    def is_past(self, other: Place) -> bool:
        """Whether a rank here will not make the call that a rank at `other` is in. Never True for an outdated place."""
        if self.closed:
            return True
        return self.turn == other.turn and self.step is not None and (other.step is None or self.step > other.step)

    def __str__(self) -> str:
        if self.closed:
            return "has closed its manager"
        return "has not called the manager for any step" if self.step is None else f"is at step {self.step}"


class Heartbeat:
    """A thread that writes a heartbeat of this rank to the store every two seconds, until `stop`.

    A heartbeat that could not be sent is retried. `check` raises the cause once retries have
    failed for so long that the other ranks consider this one dead.

    Args:
        store: a connection for the thread only
        timeout: heartbeat timeout of the other ranks; with a short one heartbeats are more frequent

    Attributes:
        place: where the rank is; sent with the heartbeat
        progress: each returns the bytes that a save in progress has written; their sum is sent too
    """

    def __init__(self, store: RankStore, timeout: float) -> None:
        self.place = Place()
        self.progress: list[Callable[[], int]] = []
        self._store = store
        self._outside = store.outside
        self._timeout = timeout
        self._pause = min(_BEAT_SECONDS, timeout / 4)
        self._over = self._outside.latch()
        self._sent_at = self._outside.now()
        self._failure: Exception | None = None
        self._thread = self._outside.start("ckpt-heartbeat", self._beat)

    def stop(self) -> None:
        """Stop the heartbeat; does not wait."""
        self._over.set()

    def end(self) -> None:
        """Send a last heartbeat, so that the others know where this rank is, and stop.

        Not to a store whose process has ended, as rank 0 does first in a script that closes nothing.
        """
        self.stop()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() or self._failure is not None:
            return
        store = self._store.until(self._outside.now())
        try:
            if store.is_held():
                self._send(store)
        except CheckpointError as error:
            logger.debug("rank %d could not send its last heartbeat: %s", self._store.rank, error)

    def check(self) -> None:
        """Raise an error if this rank has sent no heartbeat for as long as the others wait for one.

        Raises:
            RanksError: with the cause
        """
        failure, silent = self._failure, self._outside.now() - self._sent_at
        if failure is not None and silent >= self._timeout:
            raise RanksError(
                f"Rank {self._store.rank} has sent no heartbeat for {silent:.0f} s, so the other ranks consider it "
                f"dead (timeouts.heartbeat): {type(failure).__name__}: {failure}"
            ) from failure

    def _send(self, store: RankStore) -> None:
        progress = tuple(self.progress)
        written = sum(count() for count in progress) if progress else -1
        store.set(f"beat/{store.rank}", json.dumps([self._outside.date(), written, *self.place]).encode())

    def _beat(self) -> None:
        while True:
            pause = self._pause
            try:
                self._send(self._store)
            except Exception as error:
                if self._failure is None:
                    logger.warning("rank %d cannot send its heartbeat, retrying: %s", self._store.rank, error)
                self._failure = error
                if self._outside.now() - self._sent_at >= self._timeout and not self._store.is_blocked:
                    pause = _LATE_PAUSE
            else:
                if self._failure is not None:
                    logger.info("rank %d sends heartbeats again", self._store.rank)
                self._failure, self._sent_at = None, self._outside.now()
            if self._over.wait(pause):
                return


def place_of(store: RankStore, rank: int) -> Place | None:
    """Return where a rank is by its last heartbeat; None if it has sent none."""
    beat = store.peek(f"beat/{rank}")
    return None if beat is None else Place(*json.loads(beat)[2:])


class FailureDetector:
    """Watches the heartbeats of other ranks. A rank that has sent none is not considered dead: it may be starting.

    Args:
        store: the watcher's connection
        timeout: seconds without a heartbeat after which a rank is dead
        stall_timeout: seconds without a written byte after which a rank is hung; None: not checked
        seen: by rank, its last heartbeat that anybody of this process has seen, and when first; which this adds to, so
            that each wait for a dead rank but the first notices at once. No two heartbeats are the same.
    """

    def __init__(
        self,
        store: RankStore,
        timeout: float,
        stall_timeout: float | None,
        seen: dict[int, tuple[bytes | None, float]] | None = None,
    ) -> None:
        self._store = store
        self._outside = store.outside
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._beats = {} if seen is None else seen
        #: By rank: the bytes written by its last heartbeat, and since when they have not changed.
        self._bytes: dict[int, tuple[int, float]] = {}
        # Most waits are over before the first look, which takes several requests per missing rank.
        self._next = self._outside.now() + min(_LOOK_SECONDS, timeout / 4)
        #: The lost ranks that are dead; the others are hung.
        self._dead: set[int] = set()

    def dead_ranks(self, missing: Callable[[], Iterable[int]]) -> dict[int, str]:
        """Describe the missing ranks that are dead or hung; checks at most every quarter of the timeout."""
        now = self._outside.now()
        if now < self._next:
            return {}
        self._next = now + self._timeout / 4
        lost: dict[int, str] = {}
        for rank in missing():
            beat = self._store.peek(f"beat/{rank}")
            if beat == RESTING:
                beat = None
            last, since = self._beats.setdefault(rank, (beat, now))
            if beat != last:
                self._beats[rank] = (beat, now)
            elif beat is not None and now - since >= self._timeout:
                self._dead.add(rank)
                lost[rank] = f"sent no heartbeat for {self._timeout:g} s (timeouts.heartbeat); considered dead"
                continue
            written = json.loads(beat)[1] if beat is not None else -1
            last_written, since = self._bytes.setdefault(rank, (written, now))
            if written != last_written:
                self._bytes[rank] = (written, now)
            elif self._stall_timeout is not None and now - since >= self._stall_timeout:
                lost[rank] = (
                    f"is alive but has written nothing for {self._stall_timeout:g} s (timeouts.stall); considered hung"
                )
        return lost

    def check(self, missing: Callable[[], Iterable[int]]) -> None:
        """Raise RanksError if one of the missing ranks is dead or hung."""
        lost = self.dead_ranks(missing)
        if lost:
            raise ranks_failed(lost, causes=self.causes(lost))

    def causes(self, lost: Iterable[int]) -> dict[int, str]:
        """The causes for `RanksError`: a dead rank will not take part in a retry, a hung one may."""
        return {rank: (RanksError if rank in self._dead else CheckpointTimeoutError).__name__ for rank in lost}
