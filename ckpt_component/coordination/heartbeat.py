"""Signs of life: a killed rank is invisible to whoever waits for its message, but its heart stops beating."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from ..errors import CheckpointError
from .rank_store import RankStore

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0


class Heartbeat:
    """While it is entered, a thread puts this rank's count and bytes written into the store, every two seconds.

    Args:
        store: a connection for the thread alone.
        progress: bytes written so far.
        timeout: of those who watch; a short one makes it beat faster.
    """

    def __init__(self, store: RankStore, progress: Callable[[], int], timeout: float) -> None:
        self._store = store
        self._progress = progress
        self._pause = min(_BEAT_SECONDS, timeout / 4)
        self._over = threading.Event()
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

    def _beat(self) -> None:
        count = 0
        while True:
            try:
                self._store.set(f"beat/{self._store.rank}", json.dumps([time.time(), self._progress()]).encode())
            except CheckpointError as error:
                # Whoever waits for this rank is told by the store itself, and so is this rank.
                logger.debug("no more heartbeats of rank %d: %s", self._store.rank, error)
                return
            count += 1
            if self._over.wait(self._pause):
                return


class Watch:
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
        self.gone: set[int] = set()

    def lost(self, missing: Callable[[], Iterable[int]]) -> dict[int, str]:
        """What became of those of the missing ranks that are gone or hang; looks at most every quarter timeout."""
        now = time.monotonic()
        if now < self._next:
            return {}
        self._next = now + self._timeout / 4
        found: dict[int, str] = {}
        for rank in missing():
            if rank not in self._seen:
                continue
            beat = self._store.peek(f"beat/{rank}")
            if beat != self._seen[rank][0]:
                self._seen[rank] = (beat, now)
            elif beat is not None and now - self._seen[rank][1] >= self._timeout:
                self.gone.add(rank)
                found[rank] = f"gave no sign of life for {self._timeout:g} s (timeouts.heartbeat); it is gone"
                continue
            written = json.loads(beat)[1] if beat is not None else -1
            if written != self._bytes[rank][0]:
                self._bytes[rank] = (written, now)
            elif self._stall_timeout is not None and now - self._bytes[rank][1] >= self._stall_timeout:
                found[rank] = f"lives, but wrote nothing for {self._stall_timeout:g} s (timeouts.stall)"
        return found
