"""Arenas leased to one save at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from ..errors import CheckpointTimeoutError
from .arena import Arena


class ArenaPool:
    """Up to `count` arenas, each leased to one save at a time.

    Args:
        count: how many saves may be in flight.
        shared: see `Arena`.
    """

    def __init__(self, count: int, *, shared: bool) -> None:
        self._count = count
        self._shared = shared
        self._free: list[Arena] = []
        self._leased = 0
        self._leased_bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def idle_bytes(self) -> int:
        """Total size of the arenas that are not leased."""
        with self._changed:
            return sum(arena.nbytes for arena in self._free)

    @property
    def nbytes(self) -> int:
        """Total size of all arenas."""
        with self._changed:
            return self._leased_bytes + sum(arena.nbytes for arena in self._free)

    def wait_free(self, deadline: float) -> bool:
        """Wait until `lease` would not block; returns False if `deadline` (monotonic seconds) passes first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._leased < self._count, timeout=max(deadline - time.monotonic(), 0)
            )

    def lease(self, nbytes: int, timeout: float) -> Arena:
        """Lease an arena of at least `nbytes` for exclusive use until `give_back`.

        Raises:
            CheckpointTimeoutError: all arenas stayed busy for `timeout` seconds.
        """
        with self._changed:
            if self._leased >= self._count and not self.wait_free(time.monotonic() + timeout):
                raise CheckpointTimeoutError(
                    f"All {self._count} checkpoint arena(s) were still being written after {timeout:g} s "
                    "(timeouts.stage); save less often, or raise checkpoint.stager.arenas."
                )
            self._leased += 1
            for arena in self._free:
                if arena.nbytes >= nbytes:
                    self._free.remove(arena)
                    self._leased_bytes += arena.nbytes
                    return arena
            small_arena = self._free.pop() if self._free and self._leased + len(self._free) > self._count else None
        try:
            if small_arena is not None:
                small_arena.close()
            arena = Arena(nbytes, shared=self._shared)
        except BaseException:
            with self._changed:
                self._leased -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._leased_bytes += arena.nbytes
        return arena

    def give_back(self, arena: Arena, staged: Future[None] | None = None) -> None:
        """End a lease after the save was committed or given up. Can be used as a callback of the copy's future."""
        with self._changed:
            self._leased -= 1
            self._leased_bytes -= arena.nbytes
            if self._closed:
                arena.close()
            else:
                self._free.append(arena)
            self._changed.notify()

    def close(self) -> None:
        """Free the arenas that are not leased now, and the others when they are given back."""
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().close()
