"""What a process has to do with what is outside of it, as an object: a simulation replaces it. Imports no torch.

Time, threads, what threads wait for, the ID of the process and random bytes: the package takes them from an `Outside`
alone, which comes with what one works on. A `Storage`, a `RankStore` and a manager each have one; the factory gives a
run the one that it runs in. What a replacement must keep:

- `now` never goes back, and its zero has no meaning. It also advances while the process is stopped, so a deadline that
  has passed says nothing about the others.
- `date` is what the host believes, and may jump either way. It is for people: no decision depends on it.
- Waits take at least their time, and possibly much longer. `Latch.wait`, `Condition.wait`, `wait_for` and `Thread.join`
  may return late, never early.
- A thread is a daemon: the end of the process does not wait for it. It ends by itself; nothing can end it. Jobs in turn
  are those of a `Lane` (`core/lane.py`).
- `Queue.put` and `Latch.set` do not wait, and may be called in a finalizer.
- Whoever waits for a `Future` calls `wait_for`, and then asks for its result, which does not wait.
- The tasks of a pool do not wait for each other: a pool may do each when it is submitted.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from .waits import Waits

__all__ = ["OUTSIDE", "CancelledError", "Condition", "Future", "Latch", "Outside", "Pool", "Queue", "Thread"]

_Result = TypeVar("_Result")


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


class Condition(Protocol):
    """A lock, and a way to wait for what changes under it; only who has entered it may call its methods."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until `notify_all`, at most so many seconds; returns whether it came."""
        ...

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until something holds, at most so many seconds; returns the last value of `predicate`."""
        ...

    def notify_all(self) -> None:
        """Wake all who wait."""
        ...


class Pool(Protocol):
    """Threads that do independent tasks, as a context manager: when it is left, all are done."""

    def __enter__(self) -> Pool: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def submit(self, task: Callable[..., _Result], /, *arguments: Any) -> Future[_Result]:
        """Do a task; returns the future of what it returns."""
        ...

    def map(self, task: Callable[..., _Result], *arguments: Iterable[Any]) -> Iterator[_Result]:
        """Do a task with each of these; gives what each returned, in this order, or raises the first error."""
        ...

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures.Executor`."""
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
        if not self._is_set and self._unset.acquire(timeout=min(max(seconds, 0), threading.TIMEOUT_MAX)):
            self._unset.release()  # for others that wait
        return self._is_set


class Outside:
    """The real ones; see the top of this file."""

    #: Monotonic seconds, for deadlines.
    now: Callable[[], float] = staticmethod(time.monotonic)
    #: Seconds since 1970.
    date: Callable[[], float] = staticmethod(time.time)
    #: Wait so many seconds.
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    #: The ID of this process; that of a fork is another one.
    pid: Callable[[], int] = staticmethod(os.getpid)
    #: So many bytes that nobody can guess.
    random_bytes: Callable[[int], bytes] = staticmethod(os.urandom)

    #: Call a function when the interpreter ends: the last one first. Threads run until then.
    at_exit: Callable[[Callable[[], object]], object] = staticmethod(atexit.register)
    #: Do not call it any more.
    not_at_exit: Callable[[Callable[[], object]], None] = staticmethod(atexit.unregister)

    def is_ending(self) -> bool:
        """Whether the script is over, and the interpreter waits for what was begun: then nothing more is."""
        return not threading.main_thread().is_alive()

    @cached_property
    def waits(self) -> Waits:
        """For whom this process waits."""
        return Waits(self.now, self.date)

    # Between threads

    def latch(self) -> Latch:
        """A new latch."""
        return Latch()

    def queue(self) -> Queue:
        """A new queue."""
        return SimpleQueue()

    def lock(self) -> AbstractContextManager[Any]:
        """A new lock, to be held for a short time."""
        return threading.Lock()

    def condition(self, lock: AbstractContextManager[Any] | None = None) -> Condition:
        """A new condition, with this lock, which it may share with others, or one of its own."""
        return threading.Condition(lock)  # type: ignore[arg-type]

    def thread_values(self) -> Any:
        """An object whose attributes each thread has for itself."""
        return threading.local()

    def wait_for(self, futures: Collection[Future[Any]], seconds: float | None) -> bool:
        """Wait until these have ended, at most so many seconds, or without end; returns whether they have."""
        timeout = None if seconds is None else min(max(seconds, 0), threading.TIMEOUT_MAX)
        return not wait(futures, timeout).not_done

    # Threads

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> Thread:
        """Run a function on a new thread.

        Args:
            name: of the thread
            function: raises nothing
            *arguments: its arguments

        Raises:
            RuntimeError: the system starts no thread any more, or the interpreter is ending
        """
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, threads: int, name: str) -> Pool:
        """New threads for independent tasks.

        Args:
            threads: how many at most; they start when there are tasks
            name: what their names begin with
        """
        return ThreadPoolExecutor(max(threads, 1), thread_name_prefix=name)


#: That of this process.
OUTSIDE = Outside()
