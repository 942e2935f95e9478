"""Agreement of a queue or caller with its counterparts on the other ranks. Imports no torch.

Counterparts are matched at the first call that involves all ranks; a queue that is only used alone never takes part.
"""

from __future__ import annotations

import errno
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.coordination import PolledCoordinator, RankStore, distributed
from ..core.coordination.heartbeat import FailureDetector
from ..core.outside import OUTSIDE, Future
from ..errors import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    RanksError,
    describe_error,
    errno_of,
    ranks_failed,
)
from .worker_client import WorkerClient

logger = logging.getLogger(__name__)

#: A rank without a heartbeat for this long is considered dead.
HEARTBEAT_SECONDS = 30.0
#: How much longer the other ranks wait for rank 0's decision than rank 0 waits for them.
GRACE_SECONDS = 15.0
#: For a step without its own timeout; the default of collectives in `torch.distributed`.
_STEP_SECONDS = 1800.0


@dataclass(eq=False)
class ScheduledCall:
    """One request in flight.

    Attributes:
        what: name of the request in error messages
        timeout: seconds for the request
        result: its outcome on this rank
        worker: runs the request; None if there was nothing to run, or it failed before it was sent
        session: session with the other ranks; None if there are none
        number: number of the call, the same on all ranks
        looks: how often all ranks were asked about it without waiting
        is_asked_about: whether all ranks were asked about it at all
        is_posted: whether this rank's outcome is posted, or need not be any more
    """

    what: str
    timeout: float = _STEP_SECONDS
    result: Future[Any] = field(default_factory=Future)
    worker: WorkerClient | None = None
    session: PeerSession | None = None
    number: int = 0
    looks: int = 0
    is_asked_about: bool = False
    is_posted: bool = False

    def is_done(self, blocking: bool) -> bool:
        """Whether it is done on this rank; raises its `error`. Blocking: waits until it is, or its time is over."""
        outside = OUTSIDE if self.session is None else self.session.outside
        if not outside.wait_for([self.result], self.timeout if blocking else 0) and not blocking:
            return False
        if (error := self.error()) is not None:
            raise error
        return True

    def error(self) -> CheckpointError | None:
        """Why it failed on this rank, as an error of this package. A call that still runs has timed out."""
        if not self.result.done():
            return CheckpointTimeoutError(f"{self.what} was not done within its deadline.")
        error = None if self.result.cancelled() else self.result.exception(0)
        if error is None or isinstance(error, CheckpointError):
            return error
        failure = CheckpointSaveError(f"{self.what} could not be run: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


class PeerSession:
    """A queue or caller and its counterparts on the other ranks of one process group.

    Used by one thread; only the outcome of a call is sent by the thread that completes it.

    Args:
        store: its own connection, with the key prefix that all queues of the job share

    Attributes:
        outside: that of the store
    """

    def __init__(self, store: RankStore) -> None:
        self.world_size, self.outside = store.world_size, store.outside
        self._store, self._lock = store, store.outside.lock()
        self._coordinator: PolledCoordinator | None = None  # while requests are in flight
        self._detector: FailureDetector
        self._prefix: str | None = None  # prefix of all tags, set by the first call that involves all ranks
        self._calls = 0
        self._sums = 0

    def add(self, call: ScheduledCall) -> None:
        """Begin a call, on all ranks, without waiting for them.

        Raises:
            RanksError: the store cannot be reached
        """
        self._coordinate()
        call.number = self._calls
        self._calls += 1

    def look(self, call: ScheduledCall, blocking: bool) -> bool:
        """Whether the oldest open call is done on all ranks. Call this on all ranks, in the same way.

        All ranks get the same answer to the n-th look at a call.

        Args:
            call: the call; it is over unless the answer is False
            blocking: wait until it is done

        Raises:
            RanksError: it failed on a rank; the same error on all ranks, with this rank's own error as its cause. Or
                rank 0 has died, or the store cannot be reached.
            CheckpointTimeoutError: rank 0 did not decide in time
        """
        coordinator = self._join()
        tag, deadline = self._tag(call), self._deadline(call.timeout)
        if not call.is_asked_about:
            call.is_asked_about = True
            call.result.add_done_callback(lambda _: self._cast(call, call.error()))
        over = True
        try:
            if not blocking:
                call.looks += 1
                is_over = lambda: coordinator.is_counted(tag, self._detector)  # noqa: E731
                over = coordinator.look(f"{tag}/look", call.looks - 1, is_over, deadline)
            if over:
                if call.looks:
                    coordinator.leave(f"{tag}/look")
                coordinator.count(tag, deadline, self._detector)
        except RanksError as error:
            raise self._failure(call.what, error) from (call.error() if call.result.done() else None)
        finally:
            if over:
                self._may_post(call)
        return over

    def give_up(self, call: ScheduledCall, failure: CheckpointError) -> None:
        """Report the failure of a call that other ranks may still ask about. Never raises."""
        if self._prefix is None:
            return
        coordinator, tag = self._coordinate(), self._tag(call)
        self._cast(call, failure)
        try:
            if self.is_leader:
                # A rank that is behind gets the same answers to its earlier looks.
                coordinator.look(f"{tag}/look", call.looks, lambda: True, 0)
                coordinator.leave(f"{tag}/look")
                coordinator.refuse(tag, ranks_failed({0: str(failure)}))
            else:
                coordinator.leave(tag)
        except CheckpointError as error:
            logger.warning("could not tell the other ranks that %s is over on this one: %s", call.what, error)

    def run_step(self, name: str, work: Callable[[], Any], what: str, timeout: float = _STEP_SECONDS) -> None:
        """Run a step on all ranks and wait for them. Call this on all ranks.

        Args:
            name: a unique name
            work: the step
            what: name of the step in error messages
            timeout: seconds to wait for the other ranks

        Raises:
            RanksError: it failed on a rank; the same error on all ranks, with this rank's own error as its cause
            CheckpointTimeoutError: rank 0 did not decide in time
        """
        coordinator = self._join()
        tag = f"{self._prefix}/{name}"
        failure: BaseException | None = None
        try:
            work()
        except (KeyboardInterrupt, SystemExit):
            raise  # their owner does not wait for other ranks
        except BaseException as error:  # torch's CheckpointException is not an Exception
            failure = error
        coordinator.cast(tag, None, as_save_error(failure))
        try:
            coordinator.count(tag, self._deadline(timeout), self._detector)
        except RanksError as error:
            raise self._failure(what, error) from failure

    def total(self, value: int) -> int:
        """The sum over all ranks. Call this on all ranks; waits for them.

        Raises:
            CheckpointTimeoutError: not all ranks took part in time
            RanksError: a rank has died, or the store cannot be reached
        """
        coordinator = self._join()
        self._sums += 1
        return int(coordinator.decide(f"{self._prefix}/sum/{self._sums}", value, sum, self._deadline(_STEP_SECONDS)))

    def rest(self) -> None:
        """Pause the heartbeats until the next call. Call this on all ranks when no call is open."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.rest()

    @property
    def is_leader(self) -> bool:
        """Whether this rank is rank 0, which decides."""
        return self._store.rank == 0

    def _coordinate(self) -> PolledCoordinator:
        """The coordinator; its heartbeats start with the first call."""
        if self._coordinator is None:
            self._coordinator = PolledCoordinator(self._store, HEARTBEAT_SECONDS, stall_timeout=math.inf)
            self._detector = FailureDetector(self._store, HEARTBEAT_SECONDS, None)
        return self._coordinator

    def _join(self) -> PolledCoordinator:
        """Join the other ranks. The n-th queues that join on each rank are counterparts."""
        coordinator = self._coordinate()
        if self._prefix is None:
            self._prefix = str(self._store.add(f"joined-by-{self._store.rank}", 1))
        return coordinator

    def _cast(self, call: ScheduledCall, failure: CheckpointError | None) -> None:
        """Send the outcome of a call on this rank, from any thread. Never raises."""
        try:
            if self._may_post(call):
                self._coordinate().cast(self._tag(call), None, failure)
        except CheckpointError as error:
            logger.warning("could not tell the other ranks how %s went on this one: %s", call.what, error)

    def _may_post(self, call: ScheduledCall) -> bool:
        """Whether the outcome of a call may be posted, which nobody may do after that."""
        with self._lock:
            was_posted, call.is_posted = call.is_posted, True
        return not was_posted

    def _tag(self, call: ScheduledCall) -> str:
        return f"{self._prefix}/call/{call.number}"

    def _deadline(self, timeout: float) -> float:
        return self.outside.now() + timeout + (0 if self.is_leader else GRACE_SECONDS)

    def _failure(self, what: str, error: RanksError) -> RanksError:
        code = "" if error.errno is None else f" ({errno.errorcode.get(error.errno, f'errno {error.errno}')})"
        text = f"{what} did not succeed on all {self.world_size} ranks{code}. {error}"
        return RanksError(text, error.errno, error.failures, error.causes)


class Peers:
    """The other ranks of one caller or queue; none until it is used with several ranks."""

    def __init__(self) -> None:
        self._group: weakref.ref[Any] | None = None  # weak, so that it does not delay destroy_process_group()
        #: The session of the last scheduled request, if any.
        self.current: PeerSession | None = None

    def session(self) -> PeerSession | None:
        """The session with the ranks of the current default process group; None with one rank."""
        dist = distributed()
        group = None if dist is None else dist.group.WORLD
        previous = None if self._group is None else self._group()
        if group is not previous or group is None:
            store = RankStore.shared("callers")
            self.current = None if store is None else PeerSession(store)
            self._group = None if group is None else weakref.ref(group)
        return self.current


def this_rank() -> int:
    """This rank; 0 without `torch.distributed`."""
    dist = distributed()
    return 0 if dist is None else int(dist.get_rank())


def as_save_error(error: BaseException | None) -> Exception | None:
    """An error of this package with the type of the original in its message."""
    if error is None or isinstance(error, CheckpointError):
        return error
    return CheckpointSaveError(describe_error(error), errno_of(error))
