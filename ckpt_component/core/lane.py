"""`Lane`: jobs in turn on one thread beside training, with the rules for such a thread in one place.

- *Errors* of a job are those of its future. Nobody asks for the future of `post`, so its errors are logged.
- *Jobs that may be lost* are dropped while too many wait, and waited for once: `may_lose`.
- *Waiting.* `submit` never waits. `drain` and `close` wait for jobs, until a deadline, and a long wait is shown.
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
from .processes.running import OwnerProcess, refuse_at_exit

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Lane:
    """See the top of this file. Safe to use from any thread.

    Args:
        name: of the thread, which starts with the first job
        outside: what it runs in
        newest_only: a job that has not begun when another one comes is cancelled, and so is its future
        may_lose: for jobs that may be lost: `post` drops those that come while so many wait, and `drain` does not wait
            again for those that it has given up; None: none may be lost
        at_exit: seconds that the end of the interpreter waits for the jobs; None: it does not
        jobs: what they are, where a wait for them is shown, or what returns that; None: `jobs of` the name
    """

    #: What is logged of a posted job that fails.
    failure = "a job of %s failed"

    def __init__(
        self,
        name: str,
        outside: Outside = OUTSIDE,
        *,
        newest_only: bool = False,
        may_lose: int | None = None,
        at_exit: float | None = None,
        jobs: str | Callable[[], str] | None = None,
    ) -> None:
        self._what = jobs or f"jobs of {name}"
        self._name, self._outside, self._newest_only, self._may_lose = name, outside, newest_only, may_lose
        self._failure = self.failure.replace("%s", name)
        self._owner = OwnerProcess("background thread", outside)
        self._lock = outside.lock()
        self._jobs = outside.queue()
        #: Those that have not ended, in order.
        self._pending: dict[Future[Any], None] = {}
        #: Until it has ended, `drain` does not wait again, if jobs may be lost.
        self._late: Future[Any] | None = None
        self._thread: Thread | None = None
        self._values = outside.thread_values()
        # The thread has the queue alone, so that a lane can be collected.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._at_exit = None if at_exit is None else partial(_drain_at_exit, weakref.ref(self), at_exit)
        if self._at_exit is not None:
            outside.at_exit(self._at_exit)

    @property
    def waiting(self) -> int:
        """How many jobs have not ended."""
        return sum(not future.done() for future in [*self._pending])

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the lane."""
        return getattr(self._values, "is_here", False)

    def submit(self, job: Callable[..., _Result], *arguments: Any, logs: bool = False) -> Future[_Result]:
        """Do a job after the earlier ones.

        Args:
            job: what to do
            *arguments: its arguments, which are not kept when it has ended
            logs: whether its error is logged

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
            if self._thread is None:
                try:
                    self._thread = self._outside.start(self._name, _run, self._jobs, self._values, self._failure)
                except RuntimeError as error:
                    refuse_at_exit(error)
                    raise
            self._pending[future] = None
            future.add_done_callback(self._pending.pop)
            self._jobs.put((future, job, arguments, logs))
        return future

    def post(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Do a job whose future nobody asks for: its error is logged. If no thread starts, it is done here and now.

        Raises:
            CheckpointError: the lane is closed, or belongs to another process
        """
        if self._may_lose is not None and len(self._pending) > self._may_lose:
            self._dropped()
            return
        try:
            self.submit(job, *arguments, logs=True)
        except (CheckpointError, RuntimeError) as error:
            self._owner.check()
            logger.debug("%s starts no thread (%s), so the caller does its job", self._name, error)
            _try(self._failure, job, *arguments)

    def drain(self, deadline: float) -> bool:
        """Wait until the jobs so far have ended, or until a deadline, in seconds of `Outside.now`.

        Returns:
            Whether they have. On the thread of the lane, it is not waited for.
        """
        pending, thread = [*self._pending], self._thread
        if not pending or thread is None or not thread.is_alive():  # a fork has none
            return True
        if getattr(self._values, "is_here", False):
            return len(pending) <= 1
        if self._late is not None and not self._late.done():
            return False
        with self._outside.waits.on(self._what, deadline) as wait:
            if wait.for_all(partial(self._outside.wait_for, pending)):
                return True
        if self._may_lose is not None:
            self._late = pending[-1]
            self._given_up()
        return False

    def close(self, deadline: float) -> bool:
        """Take no more jobs, wait for those so far as `drain` does, and for the thread to end. Safe to call twice.

        Returns:
            Whether they have ended by the deadline. If not, the thread continues with them, and ends after them.
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

    def _dropped(self) -> None:
        """Called when a job is dropped."""

    def _given_up(self) -> None:
        """Called when `drain` waits no longer for jobs that may be lost."""


def _run(jobs: Queue, values: Any, failure: str) -> None:
    """On the thread: do what comes, until there is nothing more."""
    values.is_here = True
    while (item := jobs.get()) is not None:
        future, job, arguments, logs = item
        if future.set_running_or_notify_cancel():
            try:
                result = job(*arguments)
            except BaseException as error:  # not even SystemExit ends the thread
                if logs:
                    logger.exception(failure)
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del item, future, job, arguments  # what they hold does not stay while the thread waits


def _try(failure: str, job: Callable[..., Any], *arguments: Any) -> None:
    try:
        job(*arguments)
    except BaseException:
        logger.exception(failure)


def _drain_at_exit(lane: weakref.ref[Lane], seconds: float) -> None:
    alive = lane()
    if alive is not None:
        alive.drain(alive._outside.now() + seconds)
