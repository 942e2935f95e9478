"""Heartbeats: a rank that waits for another learns when that one has died."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, CheckpointTimeoutError, RanksError
from .calls import Place
from .rank_store import RankStore

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
#: In place of a heartbeat: none is to be expected, and the rank is not missed.
RESTING = b"[0, -1]"
#: Between tries when the others take the rank for lost already.
_LATE_PAUSE = 30.0
#: How long the last sign waits for one that is under way.
_END_SECONDS = 1.0


class Heartbeat:
    """While it is entered, a thread puts a heartbeat of this rank into the store every two seconds.

    A sign that cannot be given is tried again, over a new connection. `check` raises the cause once that has failed for
    so long that the other ranks take this one for lost.

    Args:
        store: a connection for the thread alone.
        sign: what the others are to know: the bytes written so far, and after that what else its readers expect.
        timeout: of those who watch; a short one makes it beat faster.
    """

    def __init__(self, store: RankStore, sign: Callable[[], list[Any]], timeout: float) -> None:
        self._store = store
        self._sign = sign
        self._timeout = timeout
        self._pause = min(_BEAT_SECONDS, timeout / 4)
        self._over = threading.Event()
        self._given_at = time.monotonic()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="ckpt-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(self._pause + 1)

    def stop(self) -> None:
        """Beat no more; does not wait."""
        self._over.set()

    def end(self) -> None:
        """Beat a last time, so that the others know what the sign says now, and no more."""
        self.stop()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() or self._failure is not None:
            return
        try:
            self._give_sign()
        except CheckpointError as error:
            logger.debug("rank %d could not send its last heartbeat: %s", self._store.rank, error)

    def _give_sign(self) -> None:
        self._store.set(f"beat/{self._store.rank}", json.dumps([time.time(), *self._sign()]).encode())

    def check(self) -> None:
        """Raise when this rank could send no heartbeat for as long as the others wait for one.

        Raises:
            RanksError: with the cause.
        """
        failure, silent = self._failure, time.monotonic() - self._given_at
        if failure is not None and (silent >= self._timeout or not self._thread.is_alive()):
            raise RanksError(
                f"Rank {self._store.rank} has sent no heartbeat for {silent:.0f} s, so the other ranks consider it "
                f"dead (timeouts.heartbeat): {type(failure).__name__}: {failure}"
            ) from failure

    def _beat(self) -> None:
        pause = self._pause
        try:
            while True:
                try:
                    if self._failure is not None:
                        self._store = self._store.clone()  # a connection that broke stays broken
                    self._give_sign()
                except Exception as error:
                    if self._failure is None:
                        rank = self._store.rank
                        logger.warning("rank %d cannot send its heartbeat, retrying: %s", rank, error)
                    self._failure = error
                    if time.monotonic() - self._given_at >= self._timeout:
                        pause = max(_LATE_PAUSE, self._pause)
                else:
                    if self._failure is not None:
                        logger.info("rank %d sends heartbeats again", self._store.rank)
                    self._failure, self._given_at, pause = None, time.monotonic(), self._pause
                if self._over.wait(pause):
                    return
        except BaseException as error:
            self._failure = error
            raise


class FailureDetector:
    """Looks after the heartbeats of other ranks. One that has not begun to beat is not missed: it may still start.

    Args:
        store: the watcher's connection.
        ranks: whom it watches.
        timeout: seconds without a beat after which a rank is lost.
        stall_timeout: seconds without a byte written after which it hangs; None: that does not matter.
    """

    def __init__(self, store: RankStore, ranks: Iterable[int], timeout: float, stall_timeout: float | None) -> None:
        now = time.monotonic()
        self._store = store
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._seen: dict[int, tuple[bytes | None, float]] = dict.fromkeys(ranks, (None, now))
        self._bytes: dict[int, tuple[int, float]] = dict.fromkeys(self._seen, (-1, now))
        self._next = now
        #: Those of the lost ranks whose heart stopped; the others hang.
        self.dead: set[int] = set()

    def dead_ranks(self, missing: Callable[[], Iterable[int]]) -> dict[int, str]:
        """The state of those missing ranks that are dead or hung; looks at most every quarter timeout."""
        now = time.monotonic()
        if now < self._next:
            return {}
        self._next = now + self._timeout / 4
        found: dict[int, str] = {}
        for rank in missing():
            if rank not in self._seen:
                continue
            beat = self._store.peek(f"beat/{rank}")
            if beat == RESTING:
                beat = None
            if beat != self._seen[rank][0]:
                self._seen[rank] = (beat, now)
            elif beat is not None and now - self._seen[rank][1] >= self._timeout:
                self.dead.add(rank)
                found[rank] = f"sent no heartbeat for {self._timeout:g} s (timeouts.heartbeat); considered dead"
                continue
            written = json.loads(beat)[1] if beat is not None else -1
            if written != self._bytes[rank][0]:
                self._bytes[rank] = (written, now)
            elif self._stall_timeout is not None and now - self._bytes[rank][1] >= self._stall_timeout:
                found[rank] = (
                    f"is alive but has written nothing for {self._stall_timeout:g} s (timeouts.stall); considered hung"
                )
        return found

    def causes(self, lost: Iterable[int]) -> dict[int, str]:
        """For `RanksError`: a dead rank will not take part in a retry, a hung one may."""
        return {rank: (RanksError if rank in self.dead else CheckpointTimeoutError).__name__ for rank in lost}


class Work:
    """What a rank is doing just now, for its heartbeat."""

    def __init__(self) -> None:
        self._progress: Callable[[], int] | None = None
        self.place = Place()

    def sign(self) -> list[Any]:
        """Bytes written so far by what is under way (-1 when nothing is), and the rank's place."""
        progress = self._progress
        return [-1 if progress is None else progress(), *self.place.as_plain()]

    @contextlib.contextmanager
    def under_way(self, progress: Callable[[], int]) -> Iterator[None]:
        """During the `with`, `progress` gives the bytes."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None
