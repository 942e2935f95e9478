"""Heartbeats: a rank that waits for another learns when that one has died, and where in its run it is."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import CheckpointError, CheckpointTimeoutError, RanksError, ranks_failed
from .rank_store import RankStore

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
#: In place of a heartbeat: none is to be expected, and the rank is not missed.
RESTING = b"[0, -1]"
#: Between tries when the others take the rank for dead already.
_LATE_PAUSE = 30.0
#: How long the last heartbeat waits for one that is under way.
_END_SECONDS = 1.0


class Place(NamedTuple):
    """Where a rank is in its run.

    Attributes:
        turn: how often it went back to an earlier step.
        step: the last training step that it named; None: none yet.
        closed: it saves and restores nothing more.
    """

    turn: int = 0
    step: int | None = None
    closed: bool = False

    def at(self, step: int) -> Place:
        """The place of the same rank at this step."""
        step = int(step)  # it becomes JSON
        return Place(self.turn + (self.step is not None and step < self.step), step)

    def is_past(self, other: Place) -> bool:
        """Whether a rank here no longer comes to what a rank at `other` does now. Old news never says so."""
        if self.closed:
            return True
        return self.turn == other.turn and self.step is not None and (other.step is None or self.step > other.step)

    def __str__(self) -> str:
        if self.closed:
            return "has closed its manager"
        return "has not called the manager for any step" if self.step is None else f"is at step {self.step}"


class Heartbeat:
    """A thread that puts a heartbeat of this rank into the store every two seconds, until `stop`.

    One that cannot be sent is tried again, over a new connection. `check` raises the cause once that has failed for so
    long that the other ranks take this one for dead.

    Args:
        store: a connection for the thread alone.
        timeout: of those who watch; a short one makes it beat faster.

    Attributes:
        place: of the rank; sent along.
        progress: gives the bytes written so far by what is under way, sent along; None: nothing is.
    """

    def __init__(self, store: RankStore, timeout: float) -> None:
        self.place = Place()
        self.progress: Callable[[], int] | None = None
        self._store = store
        self._timeout = timeout
        self._pause = min(_BEAT_SECONDS, timeout / 4)
        self._over = threading.Event()
        self._sent_at = time.monotonic()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._beat, name="ckpt-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; does not wait."""
        self._over.set()

    def end(self) -> None:
        """Beat a last time, so that the others know where this rank is now, and no more."""
        self.stop()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() or self._failure is not None:
            return
        try:
            self._send()
        except CheckpointError as error:
            logger.debug("rank %d could not send its last heartbeat: %s", self._store.rank, error)

    def check(self) -> None:
        """Raise when this rank could send no heartbeat for as long as the others wait for one.

        Raises:
            RanksError: with the cause.
        """
        failure, silent = self._failure, time.monotonic() - self._sent_at
        if failure is not None and silent >= self._timeout:
            raise RanksError(
                f"Rank {self._store.rank} has sent no heartbeat for {silent:.0f} s, so the other ranks consider it "
                f"dead (timeouts.heartbeat): {type(failure).__name__}: {failure}"
            ) from failure

    def _send(self) -> None:
        progress = self.progress
        written = -1 if progress is None else progress()
        self._store.set(f"beat/{self._store.rank}", json.dumps([time.time(), written, *self.place]).encode())

    def _beat(self) -> None:
        while True:
            pause = self._pause
            try:
                if self._failure is not None:
                    self._store = self._store.clone()  # a connection that broke stays broken
                self._send()
            except Exception as error:
                if self._failure is None:
                    logger.warning("rank %d cannot send its heartbeat, retrying: %s", self._store.rank, error)
                self._failure = error
                if time.monotonic() - self._sent_at >= self._timeout:
                    pause = _LATE_PAUSE
            else:
                if self._failure is not None:
                    logger.info("rank %d sends heartbeats again", self._store.rank)
                self._failure, self._sent_at = None, time.monotonic()
            if self._over.wait(pause):
                return


def place_of(store: RankStore, rank: int) -> Place | None:
    """Where a rank is, by its last heartbeat; None where it has sent none."""
    beat = store.peek(f"beat/{rank}")
    return None if beat is None else Place(*json.loads(beat)[2:])


class FailureDetector:
    """Looks after the heartbeats of other ranks. One that has not begun to beat is not missed: it may still start.

    Args:
        store: the watcher's connection.
        timeout: seconds without a heartbeat after which a rank is dead.
        stall_timeout: seconds without a byte written after which it hangs; None: that does not matter.
    """

    def __init__(self, store: RankStore, timeout: float, stall_timeout: float | None) -> None:
        self._store = store
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        #: By rank: the last heartbeat and the bytes that were written by then, and since when those are what they are.
        self._beats: dict[int, tuple[bytes | None, float]] = {}
        self._bytes: dict[int, tuple[int, float]] = {}
        self._next = time.monotonic()
        #: Those of the lost ranks whose heart stopped; the others hang.
        self._dead: set[int] = set()

    def dead_ranks(self, missing: Callable[[], Iterable[int]]) -> dict[int, str]:
        """The state of those missing ranks that are dead or hung; looks at most every quarter timeout."""
        now = time.monotonic()
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
        """For `RanksError`: a dead rank will not take part in a retry, a hung one may."""
        return {rank: (RanksError if rank in self._dead else CheckpointTimeoutError).__name__ for rank in lost}
