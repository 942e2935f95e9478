"""Arenas that are made in the background, before a save needs them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import psutil
import torch

from ...errors import CheckpointError
from ..lane import Lane
from ..memory.huge_pages import align
from ..outside import OUTSIDE, Future, Outside
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
