"""`SimulatedThreading`: stands for the module `threading` where code does not take its threads from a clock.

monkeypatch.setattr(module, "threading", SimulatedThreading(lambda: simulation.current.process))
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ..core.outside import Latch, Thread
from .simulation import SimulatedProcess


class SimulatedThreading:
    """See the top of this file. Its names are those of the module.

    Args:
        process: returns the process whose threads, locks and events are made
    """

    def __init__(self, process: Callable[[], SimulatedProcess]) -> None:
        self._process = process

    def Thread(
        self, *, target: Callable[..., None], name: str, daemon: bool, args: tuple[Any, ...] = ()
    ) -> SimulatedStart:
        """A daemon."""
        return SimulatedStart(self._process(), partial(target, *args), name)

    def Lock(self) -> AbstractContextManager[Any]:
        """A lock, as a context manager alone."""
        return self._process().outside.lock()

    def Event(self) -> SimulatedEvent:
        """An event that stays set."""
        return SimulatedEvent(self._process())

    def Condition(self, lock: AbstractContextManager[Any] | None = None) -> SimulatedCondition:
        """A condition with this lock, or one of its own."""
        return SimulatedCondition(self._process(), lock)


class SimulatedStart:
    """A `threading.Thread`: what is started, and then runs.

    Args:
        process: whose thread it is
        target: what it runs
        name: of the thread
    """

    def __init__(self, process: SimulatedProcess, target: Callable[[], None], name: str) -> None:
        self._process, self._target, self._name = process, target, name
        self._thread: Thread | None = None

    def start(self) -> None:
        """Run it."""
        self._thread = self._process.outside.start(self._name, self._target)

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float = 1e9) -> None:
        """Wait for its end, at most so many seconds."""
        if self._thread is not None:
            self._thread.join(timeout)


class SimulatedEvent:
    """A `threading.Event` that nobody clears.

    Args:
        process: whose threads wait for it
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self._latch = process.outside.latch()

    def set(self) -> None:
        """Set it."""
        self._latch.set()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._latch.is_set

    def wait(self, timeout: float = 1e9) -> bool:
        """Wait until it is set, at most so many seconds; returns whether it is."""
        return self._latch.wait(timeout)


class SimulatedCondition:
    """A `threading.Condition`.

    Args:
        process: whose threads wait for it
        lock: which it shares with others; None: one of its own
    """

    def __init__(self, process: SimulatedProcess, lock: AbstractContextManager[Any] | None = None) -> None:
        self._outside, self._lock = process.outside, process.outside.lock() if lock is None else lock
        self._waiting: list[Latch] = []

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._lock.__exit__(*exception)

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock up until it is notified, at most so many seconds; returns whether it was."""
        latch = self._outside.latch()
        self._waiting.append(latch)
        self._lock.__exit__(None, None, None)
        is_notified = latch.wait(1e9 if timeout is None else timeout)
        if latch in self._waiting:
            self._waiting.remove(latch)
        self._lock.__enter__()
        return is_notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float = 1e9) -> bool:
        """Wait until something holds, at most so many seconds; returns whether it does."""
        until = self._outside.now() + timeout
        while not predicate() and self._outside.now() < until:
            self.wait(until - self._outside.now())
        return predicate()

    def notify_all(self) -> None:
        """Wake all who wait."""
        while self._waiting:
            self._waiting.pop().set()
