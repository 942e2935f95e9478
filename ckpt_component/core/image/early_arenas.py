"""Arenas that are made in the background, before a save needs them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_futures

import psutil
import torch

from ...errors import CheckpointError
from ..memory.huge_pages import align
from .arena import Arena

logger = logging.getLogger("ckpt_component.image")

#: A thread that is stopped ends within milliseconds, unless a CUDA driver holds it.
_STOP_SECONDS = 10.0


class EarlyArenas:
    """Shared arenas whose pages one thread allocates, one arena after the other.

    The thread has normal priority: with a lower one it is suspended while it holds the kernel's lock of the address
    space, for which a training step waits that maps memory. On a busy machine that cost two to four times as much.

    Args:
        nbytes: size of each
        count: how many; fewer are made if they would not leave as much memory again. The first is made in any case.
        prepare: called by the thread with each finished arena, such as to page-lock it

    Raises:
        CheckpointError: there is not enough memory
    """

    def __init__(self, nbytes: int, count: int, prepare: Callable[[Arena], None]) -> None:
        available = psutil.virtual_memory().available
        fitting = max(min(count, available // (2 * max(nbytes, 1))), 1)
        self._arenas = [Arena(nbytes, shared=True, allocated=False, available=available) for _ in range(fitting)]
        self._prepare = prepare
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-early")
        self._made: list[Future[None]] = [self._thread.submit(self._make, arena) for arena in self._arenas]

    @property
    def nbytes(self) -> int:
        """Total size of those that were not taken."""
        return sum(arena.nbytes for arena in self._arenas)

    def fit(self, nbytes: int) -> bool:
        """Whether they are large enough for an image of this size, and not much larger."""
        return all(nbytes <= arena.nbytes <= 2 * align(nbytes) for arena in self._arenas)

    def take(self, timeout: float) -> Arena | None:
        """Take the next one, finished with all of torch's threads, because a save needs it now.

        Returns:
            The arena; None if there is none, or it could not be made within `timeout` seconds.
        """
        if not self._arenas:
            return None
        arena, made = self._arenas.pop(0), self._made.pop(0)
        with contextlib.suppress(CheckpointError):  # the thread has the same error, and warns
            arena.allocate(torch.get_num_threads())
        if wait_futures([made], timeout).not_done or made.exception() is not None:
            self._drop(arena, made)
            return None
        return arena

    def close(self) -> None:
        """Stop the thread, and free the arenas that were not taken."""
        self._stopped = True
        made, self._made = self._made, []
        while self._arenas:
            self._drop(self._arenas.pop(), made[len(self._arenas)])
        self._thread.shutdown(wait=False)
        if wait_futures(made, _STOP_SECONDS).not_done:
            logger.warning("an arena is still being page-locked after %g s; it is freed then", _STOP_SECONDS)

    def _drop(self, arena: Arena, made: Future[None]) -> None:
        arena.stop_allocating()
        made.add_done_callback(lambda _: arena.close())  # now, or when the thread has left it

    def _make(self, arena: Arena) -> None:
        if self._stopped:
            return
        try:
            arena.allocate(threads=1)
            if not self._stopped:
                self._prepare(arena)
        except Exception as error:
            logger.warning("memory for the first save could not be made while training runs: %s", error)
            raise
