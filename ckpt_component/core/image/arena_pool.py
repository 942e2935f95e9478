"""Arenas leased to one image at a time."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CheckpointTimeoutError
from ..outside import OUTSIDE, Future, Outside
from .arena import Arena
from .early_arenas import EarlyArenas

#: A plan that divides the same tensors among more files, each of which begins at a page, still fits.
_ROOM_BYTES = 1 << 20


class ArenaPool:
    """Up to `count` arenas, each leased to one image at a time.

    Args:
        count: how many images there may be: of saves in flight, and those that stay after their save
        shared: see `Arena`
        outside: whose threads lease them
    """

    def __init__(self, count: int, *, shared: bool, outside: Outside = OUTSIDE) -> None:
        self._count = count
        self._shared = shared
        self._free: list[Arena] = []
        #: What another process still reads; the newest alone, so that few readers cost little memory.
        self._lent: list[Arena] = []
        self._leased = 0
        self._leased_bytes = 0
        #: Whether an arena was leased before.
        self._used = False
        self._early: EarlyArenas | None = None
        self._closed = False
        self._outside = outside
        self._changed = outside.condition()

    @property
    def nbytes(self) -> int:
        """Total size of all arenas, leased or not."""
        with self._changed:
            early = 0 if self._early is None else self._early.nbytes
            return self._leased_bytes + early + sum(arena.nbytes for arena in (*self._free, *self._lent))

    @property
    def awaits_first_lease(self) -> bool:
        """Whether memory can still be made in advance: it must be visible to another process, and none was leased."""
        return self._shared and not self._used and not self._closed

    def reserve(self, nbytes: int, prepare: Callable[[Arena], None]) -> None:
        """Make arenas in the background, each before it is leased, unless such of this size are being made already.

        Called by the thread that leases. They begin at `start_early`, or some seconds later.

        Args:
            nbytes: size of each
            prepare: see `EarlyArenas`
        """
        early = self._early
        if not self.awaits_first_lease or (early is not None and early.fit(nbytes)):
            return
        if early is not None:
            self._early = None
            early.close()
        early = EarlyArenas(_with_room(nbytes), self._count, prepare, self._outside)
        with self._changed:
            if not self._closed:
                self._early = early
                return
        early.close()

    def start_early(self) -> None:
        """Begin with the arenas that are made in the background: a step has ended. Called by the thread that leases."""
        if self._early is not None:
            self._early.start()

    def wait_free(self, deadline: float) -> bool:
        """Wait until `lease` would not block; returns False if `deadline` (seconds of `Outside.now`) passes first."""
        with self._changed:
            return self._await_free(deadline)

    def _await_free(self, deadline: float) -> bool:
        """See `wait_free`; `_changed` is entered."""
        left = max(deadline - self._outside.now(), 0)
        return bool(self._changed.wait_for(lambda: self._leased < self._count, left))

    def lease(self, nbytes: int, timeout: float) -> Arena:
        """Lease an arena of at least `nbytes` for exclusive use until `give_back`; one that is being made is finished.

        Raises:
            CheckpointTimeoutError: all arenas stayed busy for `timeout` seconds
        """
        until = self._outside.now() + timeout
        with self._changed:
            if not self._await_free(until):
                raise CheckpointTimeoutError(
                    f"All {self._count} checkpoint arena(s) were still being written after {timeout:g} s "
                    "(timeouts.stage); save less often, or raise checkpoint.stager.arenas."
                )
            self._leased += 1
            self._used = True
            self._take_back()
            for arena in self._free:
                if arena.nbytes >= nbytes:
                    self._free.remove(arena)
                    self._leased_bytes += arena.nbytes
                    return arena
            small_arena = self._free.pop() if self._free and self._leased + len(self._free) > self._count else None
        try:
            if small_arena is not None:
                small_arena.close()
            arena = self._take_early(nbytes, until) or Arena(_with_room(nbytes), shared=self._shared)
        except BaseException:
            with self._changed:
                self._leased -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._leased_bytes += arena.nbytes
        return arena

    def _take_early(self, nbytes: int, until: float) -> Arena | None:
        early = self._early
        if early is None:
            return None
        arena = early.take(max(until - self._outside.now(), 0)) if early.fit(nbytes) else None
        if arena is None or not early.nbytes:
            self._early = None
            early.close()
        return arena

    def give_back(self, arena: Arena, staged: Future[None] | None = None) -> None:
        """End a lease after the save was committed or given up. Can be used as a callback of the copy's future.

        An arena that is not reusable is freed, unless it is awaited; another one may be made in its place.
        """
        with self._changed:
            self._leased -= 1
            self._leased_bytes -= arena.nbytes
            if self._closed or not (arena.reusable or arena.awaited):
                arena.close()
            elif arena.reusable:
                self._free.append(arena)
            else:
                self._take_back()
                for older in self._lent:
                    older.close()
                self._lent = [arena]
            self._changed.notify_all()

    def _take_back(self) -> None:
        """Have what nobody reads any more be filled again, which costs less than new pages."""
        lent, self._lent = self._lent, []
        for arena in lent:
            if arena.reusable:
                self._free.append(arena)
            elif arena.awaited:
                self._lent.append(arena)
            else:
                arena.close()

    def close(self) -> None:
        """Free the arenas that are not leased now, and the others when they are given back."""
        with self._changed:
            self._closed = True
            for arena in (*self._free, *self._lent):
                arena.close()
            self._free, self._lent = [], []
            early, self._early = self._early, None
        if early is not None:
            early.close()


def _with_room(nbytes: int) -> int:
    return nbytes + _ROOM_BYTES if nbytes >= 64 * _ROOM_BYTES else nbytes
