"""The time and the threads of a process, as an object: a simulation replaces it. Imports no torch.

`core/coordination` and `core/commit` take time and threads from here alone. The clock comes with what they wait for: a
`RankStore` and a `Storage` each have one. What a replacement must keep:

- `now` never goes back, and its zero has no meaning. It also advances while the process is stopped, so a deadline that
  has passed says nothing about the others.
- `date` is what the host believes, and may jump either way. It is for people: no decision depends on it.
- Waits take at least their time, and possibly much longer. `Latch.wait` and `Thread.join` may return late, never early.
- A thread is a daemon: the end of the process does not wait for it. It ends by itself; nothing can end it.
- `Queue.put` and `Latch.set` do not wait, and may be called in a finalizer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol


class Thread(Protocol):
    """A thread that was started."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until it has ended, at most so many seconds."""
        ...


class Queue(Protocol):
    """What one thread puts and another one gets, in this order."""

    def put(self, item: Any) -> None:
        """Add an item."""
        ...

    def get(self) -> Any:
        """Remove the first item; waits for one without a deadline, so only a daemon may call it."""
        ...


class Latch:
    """Is set once, and stays so; cheaper than `threading.Event`, because each call to the store makes one."""

    __slots__ = ("_is_set", "_unset")

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, if it is not, and wake who waits."""
        if not self._is_set:
            self._is_set = True
            self._unset.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most so many seconds; returns whether it is."""
        if not self._is_set and self._unset.acquire(timeout=max(seconds, 0)):
            self._unset.release()  # for others that wait
        return self._is_set


class Clock:
    """The real ones; see the top of this file. Has no state."""

    #: Monotonic seconds, for deadlines.
    now: Callable[[], float] = staticmethod(time.monotonic)
    #: Seconds since 1970.
    date: Callable[[], float] = staticmethod(time.time)
    #: Wait so many seconds.
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def latch(self) -> Latch:
        """A new latch."""
        return Latch()

    def queue(self) -> Queue:
        """A new queue."""
        return SimpleQueue()

    def lock(self) -> AbstractContextManager[Any]:
        """A new lock, to be held for a short time."""
        return threading.Lock()

    def thread_values(self) -> Any:
        """An object whose attributes each thread has for itself."""
        return threading.local()

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> Thread:
        """Run a function on a new thread.

        Args:
            name: of the thread
            function: raises nothing
            *arguments: its arguments
        """
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        return thread


#: That of this process.
CLOCK = Clock()
