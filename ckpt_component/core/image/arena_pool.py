"""Arenas leased to one image at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import psutil
import torch

from ...errors import CheckpointError, CheckpointTimeoutError
from ..lane import Lane
from ..outside import OUTSIDE, Future, Outside
from ..pages import align
from .arena import Arena

logger = logging.getLogger("ckpt_component.image")

#: A thread that is stopped ends within milliseconds, unless a CUDA driver holds it.
_STOP_SECONDS = 10.0
#: How long the first waits for `start`: what a restarted run does first, it does slowly.
_STEP_SECONDS = 5.0
#: Of its time that the thread works: steps need the cores.
_SHARE = 0.33


class EarlyArenas:
    """Shared arenas that one thread makes, each while training runs: the next one begins when one is taken.

    The first begins at `start`, or after some seconds. One at a time, because a training step waits for
    memory that all processes of a host ask for at once. The thread has normal priority: with a lower one it is
    suspended while it holds the kernel's lock of the address space, for which a step waits that maps memory. On a busy
    machine that cost two to four times as much.

    Args:
        nbytes: size of each
        count: how many; fewer are made if they would not leave as much memory again. The first is made in any case.
        prepare: called by the thread with each finished arena, such as to page-lock it
        outside: of the thread
    """

    def __init__(self, nbytes: int, count: int, prepare: Callable[[Arena], None], outside: Outside = OUTSIDE) -> None:
        self._each = nbytes
        self._left = count
        self._prepare = prepare
        self._stopped = False
        #: Set when the thread may begin.
        self._started = outside.latch()
        self._outside = outside
        # The end of the interpreter waits for it, as it may be in a call of a CUDA driver.
        self._lane = Lane("ckpt-early", outside, at_exit=_STOP_SECONDS, jobs="memory for the first saves")
        self._begin(least=0)

    def _begin(self, least: int) -> None:
        self._left -= 1
        #: Done when its block is mapped, and when its pages are allocated; None: there is not enough memory.
        self._mapped: Future[Arena | None] | None = self._lane.submit(self._map, least)
        self._made = self._lane.submit(self._make, self._mapped)

    @property
    def nbytes(self) -> int:
        """Size of the one that is not taken; 0: there is none any more."""
        return 0 if self._mapped is None else align(max(self._each, 1))

    def start(self) -> None:
        """Begin now: a step has ended."""
        self._started.set()

    def fit(self, nbytes: int) -> bool:
        """Whether they are large enough for an image of this size, and not much larger."""
        return nbytes <= self.nbytes <= 2 * align(nbytes)

    def take(self, timeout: float) -> Arena | None:
        """Take the next one, finished with all of torch's threads, because a save needs it now.

        Returns:
            The arena; None if there is none, or it could not be made within `timeout` seconds.
        """
        mapped, made = self._mapped, self._made
        if mapped is None:
            return None
        self._mapped = None
        self._started.set()
        arena = mapped.result(0) if self._outside.wait_for([mapped], timeout) else None
        if arena is not None:
            with contextlib.suppress(CheckpointError):  # the thread has the same error, and warns
                arena.allocate(torch.get_num_threads())
        if arena is None or not self._outside.wait_for([made], timeout) or made.exception(0) is not None:
            _drop(mapped, made)
            return None
        if self._left:
            self._begin(least=2 * self._each)
        return arena

    def close(self) -> None:
        """Stop the thread, and free the arena that was not taken."""
        self._stopped = True
        self._started.set()
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            _drop(mapped, self._made)
        if not self._lane.close(self._outside.now() + _STOP_SECONDS):
            logger.warning("an arena is still being page-locked after %g s; it is freed then", _STOP_SECONDS)

    def _map(self, least: int) -> Arena | None:
        self._started.wait(_STEP_SECONDS)
        try:
            available = psutil.virtual_memory().available
            if self._stopped or available < least:
                return None
            return Arena(self._each, shared=True, allocated=False, available=available)
        except Exception as error:  # the save itself raises it
            _warn(error)
            return None

    def _make(self, mapped: Future[Arena | None]) -> None:
        arena = mapped.result(0)  # done, as it was submitted to the same thread before
        if arena is None or self._stopped:
            return
        try:
            arena.allocate(threads=1, share=_SHARE)
            if not self._stopped:
                self._prepare(arena)
        except Exception as error:
            _warn(error)
            raise


def _drop(mapped: Future[Arena | None], made: Future[None]) -> None:
    """Free an arena, now or when the thread has left it."""

    def stop(_: Future[Arena | None]) -> None:
        arena = mapped.result(0)
        if arena is not None:
            arena.stop_allocating()
            made.add_done_callback(lambda _: arena.close())

    mapped.add_done_callback(stop)


def _warn(error: Exception) -> None:
    logger.warning("memory for the first save could not be made while training runs: %s", error)


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
