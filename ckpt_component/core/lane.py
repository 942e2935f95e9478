"""`Lane`: jobs in turn on one thread beside training, with the rules for such a thread in one place.

- *Errors* of a job are those of its future. Nobody asks for the future of `post`, so its errors are logged.
- *Waiting.* `submit` never waits. `drain` and `close` wait for jobs, until a deadline.
- *A thread that cannot start*, as the system has no more of them or the interpreter is ending, is an error of `submit`,
  and the job is not done. `post` does it itself, as nobody would hear of it.
- *A fork* copies a lane without its thread: it takes no jobs there, and there is nothing to wait for.
- *The end of the interpreter* does not wait for a lane: the thread is a daemon. Who owes the jobs to somebody closes
  the lane, or says how long the end may take (`at_exit`).
- *A lane that nobody has any more* ends after the jobs that it was given.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..errors import CheckpointError
from .outside import OUTSIDE, Future, Outside, Queue, Thread
from .processes.owner_process import OwnerProcess, refuse_at_exit

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Lane:
    """See the top of this file. Safe to use from any thread.

    Args:
        name: of the thread, which starts with the first job
        outside: what it runs in
        newest_only: a job that has not begun when another one comes is cancelled, and so is its future
        at_exit: seconds that the end of the interpreter waits for the jobs; None: it does not
    """

    def __init__(
        self, name: str, outside: Outside = OUTSIDE, *, newest_only: bool = False, at_exit: float | None = None
    ) -> None:
        self._name, self._outside, self._newest_only = name, outside, newest_only
        self._owner = OwnerProcess("background thread", outside)
        self._lock = outside.lock()
        self._jobs = outside.queue()
        #: Those that have not ended, in order.
        self._pending: dict[Future[Any], None] = {}
        self._thread: Thread | None = None
        self._values = outside.thread_values()
        self._is_closed = False
        # The thread has the queue alone, so that a lane can be collected.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._at_exit = None if at_exit is None else partial(_drain_at_exit, weakref.ref(self), at_exit)
        if self._at_exit is not None:
            outside.at_exit(self._at_exit)

    @property
    def waiting(self) -> int:
        """How many jobs have not ended."""
        return len(self._pending)

    @property
    def newest(self) -> Future[Any] | None:
        """The future of the last job, if it has not ended."""
        pending = [*self._pending]
        return pending[-1] if pending else None

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the lane."""
        return getattr(self._values, "is_here", False)

    def submit(self, job: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Do a job after the earlier ones.

        Args:
            job: what to do
            *arguments: its arguments, which are not kept when it has ended

        Returns:
            What it returns, or raises. Who waits for it does so by `Outside.wait_for`.

        Raises:
            CheckpointError: the lane is closed or belongs to another process, or the interpreter is ending
            RuntimeError: the system starts no more threads
        """
        future = Future[_Result]()
        with self._lock:
            self._owner.check()
            if self._newest_only:
                for waiting in [*self._pending]:
                    waiting.cancel()
            self._start()
            self._pending[future] = None
            future.add_done_callback(partial(_forget, self._pending))
            self._jobs.put((future, job, arguments))
        return future

    def post(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Do a job whose future nobody asks for: its error is logged. If no thread starts, it is done here and now.

        Raises:
            CheckpointError: the lane is closed, or belongs to another process
        """
        logged = partial(_logged, self._name, job, *arguments)
        try:
            self.submit(logged)
        except (CheckpointError, RuntimeError) as error:
            self._owner.check()
            logger.debug("%s starts no thread (%s), so the caller does its job", self._name, error)
            logged()

    def drain(self, deadline: float) -> bool:
        """Wait until the jobs so far have ended, or until a deadline, in seconds of `Outside.now`.

        Returns:
            Whether they have. On the thread of the lane, it is not waited for.
        """
        if not self._owner.is_here:
            return True
        if self.is_here:
            return len(self._pending) <= 1
        return self._outside.wait_for([*self._pending], deadline - self._outside.now())

    def close(self, deadline: float) -> bool:
        """Take no more jobs, wait for those so far as `drain` does, and for the thread to end. Safe to call twice.

        Returns:
            Whether they have ended by the deadline. If not, the thread goes on with them, and ends after them.
        """
        self.stop(cancel=False)
        has_ended = self.drain(deadline)
        if has_ended and self._thread is not None and self._owner.is_here and not self.is_here:
            self._thread.join(max(deadline - self._outside.now(), 0.0))
        return has_ended

    def stop(self, *, cancel: bool = True) -> None:
        """Take no more jobs, and end the thread after the one that runs. Does not wait. Safe to call twice.

        Args:
            cancel: do not begin those that wait; their futures are cancelled
        """
        with self._lock:
            if self._owner.closed or not self._owner.is_here:
                return
            self._owner.closed = True
        for future in [*self._pending] if cancel else []:
            future.cancel()
        self._jobs.put(None)
        if self._at_exit is not None:
            self._outside.not_at_exit(self._at_exit)

    def _start(self) -> None:
        if self._thread is None:
            try:
                self._thread = self._outside.start(self._name, _run, self._jobs, self._values)
            except RuntimeError as error:
                refuse_at_exit(error)
                raise


def _run(jobs: Queue, values: Any) -> None:
    """On the thread: do what comes, until there is nothing more."""
    values.is_here = True
    while (job := jobs.get()) is not None:
        _do(*job)
        del job  # what it holds does not stay while the thread waits


def _do(future: Future[Any], job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = job(*arguments)
        except BaseException as error:  # not even SystemExit ends the thread
            future.set_exception(error)
            del future, job, arguments  # the traceback refers to them, and so to itself
        else:
            future.set_result(result)


def _logged(name: str, job: Callable[..., Any], *arguments: Any) -> None:
    try:
        job(*arguments)
    except Exception:
        logger.exception("a job of %s failed", name)


def _forget(pending: dict[Future[Any], None], future: Future[Any]) -> None:
    pending.pop(future, None)


def _drain_at_exit(lane: weakref.ref[Lane], seconds: float) -> None:
    alive = lane()
    if alive is not None:
        alive.drain(alive._outside.now() + seconds)
