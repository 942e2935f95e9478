"""`Simulation`: processes whose threads and time are simulated, so that a seed is a schedule.

    simulation = Simulation(seed=7)
    rank = simulation.process("rank 0")
    rank.start(train, rank)            # any code that takes its time and threads from `rank.outside`
    simulation.at(3.0, rank.kill)
    simulation.run(limit=600.0)        # simulated seconds

One simulated thread runs at a time, until it waits or comes to an operation (`SimulatedProcess.turn`: a call to a
simulated store or storage). Each operation takes a random time, so which thread is next depends on the seed alone. Time
passes only while all wait, so an hour costs nothing. Real locks must not be held over an operation. Needs `greenlet`.

Processes are on hosts, each with a name. Connections between them, and new processes, are not simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet

from ..core.outside import HOST_VARIABLE, Condition, Future, Latch, Outside, Pool
from .simulated_pool import SimulatedPool

#: Process IDs begin above those that a system gives.
_FIRST_PID = 1 << 23


class Killed(SystemExit):
    """The process of this thread has ended: raised by each wait and operation.

    Derived from SystemExit, so that no handler of errors takes it for one.
    """


class Simulation:
    """See the top of this file.

    Args:
        seed: decides every choice
        quickest: the least time of an operation, in seconds
        slowest: the most; the time is log-uniform between them, so that a slow one is overtaken many times

    Attributes:
        now: simulated seconds since the beginning
        random: the source of all choices
        turns: how often a thread was resumed
        processes: all that there were
        failures: exceptions that a thread did not catch
    """

    def __init__(self, seed: int, quickest: float = 1e-4, slowest: float = 1e-2) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.turns = 0
        self._limit = math.inf
        self._quickest, self._slowest = quickest, slowest
        self.failures: list[BaseException] = []
        self._numbers = itertools.count()
        #: (when, number, thread or action, which wait of the thread is over)
        self._events: list[tuple[float, int, SimulatedThread | Callable[[], None], int]] = []
        self.scheduler = getcurrent()
        #: The thread that runs.
        self._current: SimulatedThread | None = None
        self.processes: list[SimulatedProcess] = []
        #: Threads of `SimulatedProcess.start` that have not ended.
        self.running = 0

    def process(self, name: str, host: str = "host", parent: SimulatedProcess | None = None) -> SimulatedProcess:
        """A new process, which runs nothing yet; arguments as of `SimulatedProcess`."""
        return SimulatedProcess(self, name, host, parent)

    def find(self, pid: int, host: str) -> SimulatedProcess | None:
        """The process with an ID, if it is on a host."""
        number = pid - _FIRST_PID
        found = self.processes[number] if 0 <= number < len(self.processes) else None
        return found if found is not None and found.host == host else None

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a time, such as `process.kill`."""
        heapq.heappush(self._events, (when, next(self._numbers), action, 0))

    def run(self, limit: float) -> bool:
        """Run until what was started has ended, then end all processes.

        Args:
            limit: simulated seconds

        Returns:
            Whether it has ended by then.

        Raises:
            BaseException: the first that a thread did not catch
        """
        self._limit = limit
        while self.running and self._events and self._events[0][0] <= limit:
            self._step()
        ended = not self.running
        for process in self.processes:
            process.end()
        while self._events:
            self._step()
        if self.failures:
            raise self.failures[0]
        return ended

    def _step(self) -> None:
        when, _, what, wait = heapq.heappop(self._events)
        if not isinstance(what, SimulatedThread):
            self.now = max(self.now, when)
            what()
        elif what.is_alive() and wait == what.wait:
            process = what.process
            if when < process.stopped_until and not process.is_dead:
                heapq.heappush(self._events, (process.stopped_until, next(self._numbers), what, wait))
                return
            self.now = max(self.now, when)
            self.turns += 1
            self._current = what
            what.greenlet.switch()
            self._current = None

    def duration(self) -> float:
        """How long an operation takes."""
        return float(self._quickest * (self._slowest / self._quickest) ** self.random.random())

    @property
    def current(self) -> SimulatedThread:
        """The thread that runs."""
        assert self._current is not None, "only what `SimulatedProcess.start` runs can wait in a simulation"
        return self._current

    def resume(self, thread: SimulatedThread, when: float) -> None:
        """Let the present wait of a thread end at a time, unless it ends before. One that has ended has none."""
        if not thread.greenlet.dead:
            heapq.heappush(self._events, (when, next(self._numbers), thread, thread.wait))

    def park(self, until: float = math.inf) -> None:
        """Let the running thread wait until it is resumed, or until a time. Raises Killed."""
        own = self.current
        if own.process.is_dead:
            raise Killed
        own.wait += 1
        is_next = not self._events or until < self._events[0][0]  # as mostly; that needs no switch
        if is_next and self.running and own.process.stopped_until <= until <= self._limit:
            self.now, self.turns = max(self.now, until), self.turns + 1
            return
        if until < math.inf:
            self.resume(own, until)
        self.scheduler.switch()
        if own.process.is_dead:
            raise Killed


class SimulatedProcess:
    """A process with simulated threads.

    Args:
        simulation: the simulation
        name: for messages
        host: where it runs
        parent: which has started it

    Attributes:
        name, host, parent: see above
        pid: its ID
        outside: its time and threads
        is_dead: whether it has ended
        is_killed: whether `kill` has ended it, and not the end of the simulation
        ended_at: when it has ended, in simulated seconds; infinite: it has not
        stopped_until: when it continues, if it is stopped
        slowness: how much longer than usual its operations take
        date_offset: by how many seconds its host's date is wrong
    """

    def __init__(self, simulation: Simulation, name: str, host: str, parent: SimulatedProcess | None = None) -> None:
        self.simulation = simulation
        self.name, self.host, self.pid, self.parent = name, host, _FIRST_PID + len(simulation.processes), parent
        simulation.processes.append(self)
        self.began_at = simulation.now
        self.is_dead = self.is_killed = False
        self.ended_at = math.inf
        self.stopped_until = 0.0
        self.slowness = 1.0
        self.date_offset = 0.0
        self.threads: list[SimulatedThread] = []
        self.outside = self.make_outside()

    def make_outside(self) -> SimulatedOutside:
        """Called once."""
        return SimulatedOutside(self)

    def start(self, function: Callable[..., None], *arguments: Any, after: float = 0.0) -> None:
        """Run a function as a thread that the simulation waits for, from so many seconds on."""
        self.simulation.running += 1
        SimulatedThread(self, function, arguments, is_waited_for=True, after=after)

    def turn(self) -> None:
        """An operation: it takes a while, and other threads run. Raises Killed."""
        self.simulation.park(self.simulation.now + self.simulation.duration() * self.slowness)

    def kill(self, number: int = 9) -> None:
        """End it, as SIGKILL does: no thread does anything more."""
        self.is_killed = True
        self.end(-number)

    def end(self, code: int = 0) -> None:
        """End it, as with the simulation; with a code, as `subprocess` says it."""
        if not self.is_dead:
            self.is_dead = True
            self.ended_at = self.simulation.now
            for thread in self.threads:
                self.simulation.resume(thread, self.simulation.now)

    @cached_property
    def environment(self) -> dict[str, str]:
        """Its environment variables."""
        return {HOST_VARIABLE: self.host}

    def stop(self, seconds: float) -> None:
        """Let it do nothing for a while, as SIGSTOP does. Its time passes."""
        self.stopped_until = self.simulation.now + seconds


class SimulatedThread:
    """A thread of a simulated process."""

    def __init__(
        self,
        process: SimulatedProcess,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        is_waited_for: bool = False,
        after: float = 0.0,
    ) -> None:
        self.process = process
        self.wait = 0
        self._call = function, arguments
        self._is_waited_for = is_waited_for
        self._over = SimulatedLatch(process.simulation)
        self.greenlet = greenlet(self._run, process.simulation.scheduler)
        process.threads.append(self)
        process.simulation.resume(self, process.simulation.now + after)

    def _run(self) -> None:
        function, arguments = self._call
        del self._call  # the thread may be the last to hold them
        try:
            if not self.process.is_dead:
                function(*arguments)
        except Killed:
            pass
        except BaseException as error:
            self.process.simulation.failures.append(error)
        finally:
            self.process.threads.remove(self)
            self._over.set()
            self.process.simulation.running -= self._is_waited_for

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self._over.is_set

    def join(self, timeout: float) -> None:
        """Wait until it has ended, at most so many seconds."""
        self._over.wait(timeout)


class SimulatedLatch(Latch):
    """A latch of simulated threads."""

    __slots__ = ("_simulation", "_waiting")

    def __init__(self, simulation: Simulation) -> None:
        self._is_set = False
        self._simulation = simulation
        self._waiting: list[SimulatedThread] = []

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._is_set = True
        for thread in self._waiting:
            self._simulation.resume(thread, self._simulation.now)
        self._waiting = []

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most so many simulated seconds."""
        if not self._is_set:
            thread = self._simulation.current
            self._waiting.append(thread)
            self._simulation.park(self._simulation.now + max(seconds, 0))
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class SimulatedQueue:
    """A queue from which one simulated thread takes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._items: deque[Any] = deque()
        self._waiting: SimulatedThread | None = None

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiting is not None:
            self._simulation.resume(self._waiting, self._simulation.now)

    def get(self) -> Any:
        """Remove the first item; waits for one."""
        while not self._items:
            self._waiting = self._simulation.current
            try:
                self._simulation.park()
            finally:  # also when the process has ended
                self._waiting = None
        return self._items.popleft()


class SimulatedLock:
    """A lock for simulated threads."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._is_held = False
        self._waiting: deque[SimulatedThread] = deque()

    def __enter__(self) -> None:
        while self._is_held:
            self._waiting.append(self._simulation.current)
            self._simulation.park()
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting:
            self._simulation.resume(self._waiting.popleft(), self._simulation.now)


class SimulatedCondition:
    """A condition of simulated threads.

    Args:
        outside: of the process
        lock: which it shares with others
    """

    def __init__(self, outside: SimulatedOutside, lock: AbstractContextManager[Any]) -> None:
        self._outside, self._lock = outside, lock
        self._waiting: list[Latch] = []

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._lock.__exit__(*exception)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until it is notified, at most so many seconds; returns whether it was."""
        latch = self._outside.latch()
        self._waiting.append(latch)
        self._lock.__exit__(None, None, None)
        is_notified = latch.wait(math.inf if timeout is None else timeout)
        if latch in self._waiting:
            self._waiting.remove(latch)
        self._lock.__enter__()
        return is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until something holds, at most so many seconds; returns the last value of the predicate."""
        until = math.inf if timeout is None else self._outside.now() + timeout
        while not (found := predicate()) and self._outside.now() < until:
            self.wait(until - self._outside.now())
        return found

    def notify_all(self) -> None:
        """Wake all who wait."""
        while self._waiting:
            self._waiting.pop().set()


class SimulatedOutside(Outside):
    """What a simulated process runs in. The zero of its time is its own, as on another host."""

    def __init__(self, process: SimulatedProcess) -> None:
        simulation = process.simulation
        zero = simulation.random.uniform(0, 1e6)
        self.process = process
        self.now = lambda: simulation.now + zero
        self.date = lambda: 1.7e9 + simulation.now + process.date_offset
        self.sleep = lambda seconds: simulation.park(simulation.now + max(seconds, 0))
        self.random_bytes = simulation.random.randbytes
        self.pid = lambda: process.pid

    def at_exit(self, function: Callable[[], object]) -> None:
        """No interpreter ends here: `kill`, or the end of its threads, ends a process."""

    def not_at_exit(self, function: Callable[[], object]) -> None:
        """See `at_exit`."""

    def is_ending(self) -> bool:
        """See `at_exit`."""
        return False

    def latch(self) -> Latch:
        """A latch of simulated threads."""
        return SimulatedLatch(self.process.simulation)

    def queue(self) -> SimulatedQueue:
        """A queue between simulated threads."""
        return SimulatedQueue(self.process.simulation)

    def lock(self) -> SimulatedLock:
        """A lock of simulated threads."""
        return SimulatedLock(self.process.simulation)

    def condition(self, lock: AbstractContextManager[Any] | None = None) -> Condition:
        """A condition of simulated threads."""
        return SimulatedCondition(self, self.lock() if lock is None else lock)

    def thread_values(self) -> Any:
        """Attributes that each simulated thread has for itself."""
        return _ThreadValues(self.process.simulation)

    def wait_for(self, futures: Collection[Future[Any]], seconds: float | None) -> bool:
        """Wait until these have ended, at most so many simulated seconds."""
        until = math.inf if seconds is None else self.now() + seconds
        for future in futures:
            latch = self.latch()
            future.add_done_callback(lambda _, latch=latch: latch.set())  # type: ignore[misc]
            if not latch.wait(until - self.now()):
                return False
        return True

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> SimulatedThread:
        """Run a function on a new simulated thread of the process."""
        return SimulatedThread(self.process, function, arguments)

    def pool(self, threads: int, name: str) -> Pool:
        """No threads: each task is done when it is submitted."""
        return SimulatedPool()

    @property
    def environment(self) -> dict[str, str]:  # type: ignore[override]
        """The environment variables of the process."""
        return self.process.environment

    def host_name(self) -> str:
        """The name of the process's host."""
        return self.process.host

    def parent(self) -> int:
        """The ID of its parent; 1: there is none any more."""
        parent = self.process.parent
        return 1 if parent is None or parent.is_dead else parent.pid

    def space(self) -> str:
        """Identifies the host."""
        return f"{zlib.crc32(self.process.host.encode()):08x}"

    def is_running(self, pid: int) -> bool:
        """Whether a process with this ID runs on this host."""
        found = self.process.simulation.find(pid, self.process.host)
        return found is not None and not found.is_dead

    def started(self, pid: int) -> int | None:
        """When a process of this host has started; None: it has ended."""
        found = self.process.simulation.find(pid, self.process.host)
        if found is None:
            raise ProcessLookupError(pid)
        return None if found.is_dead else int(found.began_at * 100) + 1


class _ThreadValues:
    """Attributes that each simulated thread has for itself."""

    def __init__(self, simulation: Simulation) -> None:
        vars(self).update(simulation=simulation, values=WeakKeyDictionary())

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["values"][vars(self)["simulation"].current][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["values"].setdefault(vars(self)["simulation"].current, {})[name] = value
