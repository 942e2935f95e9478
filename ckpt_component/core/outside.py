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
- A process is of a host, which has a name; its ID is not used by another one while it runs.
- A connection is a stream of bytes with two ends, each a `Socket`. An end is closed when nobody has it any more: who
  had it, or was sent its descriptor, has closed it or ended. What was sent before arrives anyway, and then its
  end. Between hosts a connection may be silent for any time, and may end at any time, for both sides.
- A call on a socket waits at most as long as its timeout. Who has an open socket closes it, also after an error.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .available_memory import available_bytes
from .options import IoPriority
from .sockets import Address, Socket, Sockets
from .waits import Waits

if TYPE_CHECKING:
    import subprocess

__all__ = ["OUTSIDE", "Address", "CancelledError", "Condition", "Empty", "Future", "Latch", "Outside", "Pool"]
__all__ += ["Process", "Queue", "Socket", "Thread"]

_Result = TypeVar("_Result")

logger = logging.getLogger("ckpt_component.callers")

#: The environment variable that overrides the name of the host, so that one machine can be several.
HOST_VARIABLE = "CKPT_HOST"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
#: The arguments are the folder of this package and the descriptor of the connection.
_CODE = "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; from {} import main; main()"
#: Users other than root may set one group in a tenth of a second, on the whole host.
_TRY_SECONDS, _PAUSE_SECONDS = 2.0, 0.02


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


class Process(Protocol):
    """A process that `Outside.launch` has started.

    Attributes:
        pid: its ID
    """

    pid: int

    def poll(self) -> int | None:
        """How it has ended: its exit code, or the negative number of a signal; None: it is running."""
        ...

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, at most so many seconds; returns as `poll`."""
        ...

    def kill(self) -> None:
        """End it at once, by SIGKILL. Does nothing if it has ended."""
        ...

    def lines(self) -> Iterator[bytes]:
        """The lines that it prints, until its end; only if it was launched so that they are read."""
        ...

    def leave(self) -> None:
        """Let it live on by itself: nobody here waits for its end any more."""
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


class _RealProcess:
    """See `Process`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid
        self.poll, self.kill = process.poll, process.kill

    def wait(self, seconds: float) -> int | None:
        import subprocess  # it is loaded

        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode

    def lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None  # as it is captured
        with self._process.stdout as lines:
            yield from lines

    def leave(self) -> None:
        self._process.returncode = 0  # else `subprocess` would warn when this object is freed


class Outside(Sockets):
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
    #: The environment variables of this process.
    environment: MutableMapping[str, str] = os.environ
    #: Returns the storage of a path, where disks and buckets are simulated; None: they are what they are.
    storage_of: Callable[[str], Any] | None = None

    def __reduce__(self) -> str:
        """The real one is pickled by its name, as the storage that has it is: there it is the one of that process."""
        return "OUTSIDE"

    def at_exit(self, function: Callable[[], object]) -> None:
        """Call a function when the interpreter ends: the last one first. Threads run until then."""
        atexit.register(function)

    def not_at_exit(self, function: Callable[[], object]) -> None:
        """Do not call it any more."""
        atexit.unregister(function)

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
            threads: how many at most; they start when there are tasks. A single one does them in their order.
            name: what their names begin with
        """
        return ThreadPoolExecutor(max(threads, 1), thread_name_prefix=name)

    # Processes

    def host_name(self) -> str:
        """The name of the host of this process; the environment variable CKPT_HOST overrides it."""
        return self.environment.get(HOST_VARIABLE) or socket.gethostname()

    def parent(self) -> int:
        """The ID of the process that has started this one; it changes when that one has ended."""
        return os.getppid()

    def free_memory(self) -> int:
        """How many bytes of memory are available on this host; raises as `available_bytes`."""
        return available_bytes()

    def space(self) -> str:
        """Identifies the processes that this one sees: of one boot of one host, in one container; empty: unknown."""
        try:
            if os.readlink("/proc/self") != str(self.pid()):
                return ""  # /proc shows the processes of another container
            with open("/proc/sys/kernel/random/boot_id") as stream:
                boot = stream.read()
            return hashlib.sha256(f"{boot}{os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:8]
        except OSError:
            return ""

    def is_running(self, pid: int) -> bool:
        """Whether there is a process with an ID in this `space`, of any user; also one that was not waited for."""
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            pass  # it is another user's
        return True

    def started(self, pid: int) -> int | None:
        """When a process of this `space` has started, in ticks since the host has; None: it has ended.

        Raises:
            OSError: there is no such process, or it is hidden from this user
        """
        with open(f"/proc/{pid}/stat", "rb") as stream:
            values = stream.read().rpartition(b")")[2].split()
        return None if values[0] in (b"Z", b"X") else int(values[19])

    def launch(
        self,
        module: str,
        connection: Socket,
        *,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
        reads_output: bool = False,
    ) -> Process:
        """Start a process on this host that calls the function `main` of a module, without arguments.

        A simulated one passes the `Outside` of the new process to `main`.

        Args:
            module: its full name
            connection: one end of a `pair`, which `inherited` gives to the process; the caller closes its own
            flags: of the interpreter
            environment: variables to set there
            own_session: signals to the process group of this process do not reach it
            reads_output: what it prints is read by `Process.lines`; else only its stderr goes where this process's goes

        Raises:
            OSError: the system could not start it
        """
        import subprocess  # processes that start no others do not load it

        descriptor = connection.fileno()
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _CODE.format(module), _PACKAGE_ROOT, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if reads_output else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if reads_output else None,
            env={**self.environment, **(environment or {})},
            start_new_session=own_session,
        )
        return _RealProcess(process)

    def lower_priority(self, pid: int, nice: int, io_priority: IoPriority) -> None:
        """Lower the priority of a process on this host. If that fails, a line is logged and it keeps its priority.

        Args:
            pid: its ID
            nice: nice value, 0 to 19; not applied if the process has a higher one
            io_priority: I/O priority
        """
        import psutil  # late: the worker processes import this module too, and do not need psutil

        try:
            process = psutil.Process(pid)
            nice = max(nice, process.nice())
            process.nice(nice)
            if io_priority is IoPriority.low:
                process.ionice(psutil.IOPRIO_CLASS_BE, 7)
            elif io_priority is IoPriority.idle:
                process.ionice(psutil.IOPRIO_CLASS_IDLE)
        except (psutil.Error, OSError) as error:
            logger.warning("the checkpoint writer process keeps its normal priority (%s)", error)
            return
        self._lower_group(pid, nice)

    def _lower_group(self, pid: int, nice: int) -> None:
        """Where the kernel groups tasks by session, give the group of a session's leader the same priority.

        There `nice` counts only among the tasks of one session, and a process in its own session gets as much of a
        busy core as all of the training; see "The autogroup feature" in sched(7).
        """
        group, deadline = f"/proc/{pid}/autogroup", self.now() + _TRY_SECONDS
        try:
            while os.getsid(pid) == pid and os.path.exists(group):
                with open(group, "r+b", buffering=0) as setting:
                    if setting.write(b"%d" % nice) is not None:
                        return
                if self.now() > deadline:
                    raise TimeoutError(f"other groups were set for {_TRY_SECONDS:g} s")
                self.sleep(_PAUSE_SECONDS)
        except OSError as error:  # read-only in some containers
            text = "%s keeps its normal priority, which counts where no cgroup divides the cores (%s)"
            logger.info(text, group, error)

    def inherited(self) -> Socket:
        """In a process that `launch` has started: the connection to who has started it. Called once."""
        return self.adopt(int(sys.argv[2]))

    def on_signal(self, number: int, action: Callable[[], None] | None) -> None:
        """Call this when a signal comes, on the main thread, which asks for it; None: nothing happens then."""
        signal.signal(number, signal.SIG_IGN if action is None else lambda *_: action())

    def exit(self) -> None:
        """End this process at once, as if it was killed, and without an error. Does not return."""
        os._exit(0)

    def leave_folder(self) -> None:
        """Let the folder that this process was started in be removed or unmounted."""
        os.chdir("/")

    def be_silent(self) -> None:
        """Let go of stdout and stderr: who reads them waits until nobody has them open."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], None]]:
        """While entered, by the main thread, others may end it: who calls what is given raises SystemExit(1) there."""
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
        try:
            yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        finally:
            signal.signal(signal.SIGALRM, lambda *_: None)


#: That of this process.
OUTSIDE = Outside()
