"""What one queue or caller decides together with those of the other ranks. Imports no torch.

Which of them belong together is settled when they are first used together: until then a rank has sent nothing, and one
that only ever looks alone never does.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..coordination import RankStore, StoreCoordinator, distributed
from ..coordination.heartbeat import FailureDetector
from ..errors import CheckpointError, CheckpointSaveError, RanksError, ranks_failed
from ..writing.remote_error import describe_failure

logger = logging.getLogger(__name__)

#: Without a heartbeat for so long, a rank is dead.
HEARTBEAT_SECONDS = 30.0
#: The other ranks wait so much longer for rank 0's decision than rank 0 waits for them.
GRACE_SECONDS = 15.0
#: For a step that has no time of its own; `torch.distributed` gives a collective as long.
_STEP_SECONDS = 1800.0
#: So many queues that were used are remembered, to compare their order on all ranks.
_REMEMBERED = 64


@dataclass(eq=False)
class SharedCall:
    """One request in flight.

    Attributes:
        what: the request, for error texts.
        result: how it goes on this rank.
        timeout: seconds that it may take.
    """

    what: str
    result: Future[Any] = field(default_factory=Future)
    timeout: float = _STEP_SECONDS
    number: int = 0
    looks: int = 0
    is_cast: bool = False  # how it went here was sent to rank 0, or need not be any more

    def error(self) -> CheckpointError | None:
        """Why it failed, as an error of this package; None while it runs."""
        error = self.result.exception(0) if self.result.done() and not self.result.cancelled() else None
        if error is None or isinstance(error, CheckpointError):
            return error
        wrapped = CheckpointSaveError(f"{self.what} could not be run: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped


class PeerSession:
    """A queue or caller together with those of the other ranks, in one process group. Used by one thread.

    Args:
        store: a connection of its own, with keys that all queues of the job share.
        made: when the queue was made, to tell the order of this rank's queues.
    """

    def __init__(self, store: RankStore, made: int) -> None:
        self.world_size = store.world_size
        self.is_leader = store.rank == 0
        self._store = store
        self._order = QueueOrder(store, made)
        self._coordinator: StoreCoordinator | None = None  # while requests are in flight
        self._watch: FailureDetector | None = None
        self._prefix: str | None = None  # of all tags, from the first use on all ranks together
        self._place: list[int] = []
        self._is_in_place = False  # on all ranks, as far as rank 0 has seen
        self._alone = False
        self._calls = 0
        self._sums = 0
        self._open: list[SharedCall] = []
        self._casting = threading.Lock()
        #: For the threads in which calls end. Made now: a new connection to a dead store takes minutes to fail.
        self._cast_store = store.clone()

    def add(self, call: SharedCall) -> None:
        """A call begins, on all ranks. Waits for none of them.

        Raises:
            RanksError: the store cannot be reached.
        """
        call.number = self._calls
        self._calls += 1
        self._open.append(call)
        self._coordinate()
        if self._prefix is not None:
            self._cast_when_done(call)
        elif not self._alone:
            self._order.wait()

    def look_alone(self) -> None:
        """This rank looks at a call by itself."""
        if self._prefix is None and not self._alone:
            self._alone = True
            self._order.forget()

    def look(self, call: SharedCall, blocking: bool) -> bool:
        """Whether the oldest open call is done on all ranks. Call this on all ranks, in the same way.

        All ranks get the same answer in the n-th look at a call.

        Args:
            call: closed afterwards, unless the answer is False.
            blocking: wait until it is done.

        Raises:
            RanksError: it failed on a rank; the same on all of them, with this rank's own error as its cause. Or rank 0
                has died, or the store cannot be reached.
            CheckpointTimeoutError: rank 0 did not decide in time.
        """
        coordinator, watch = self._join()
        tag = self._tag(call)
        deadline = self._deadline(call.timeout)
        try:
            if not blocking:
                call.looks += 1
                is_over = lambda: coordinator.is_counted(tag, watch)  # noqa: E731
                if not coordinator.look(f"{tag}/look", call.looks - 1, is_over, deadline):
                    return False
            coordinator.count(tag, deadline, self._check_order, watch)
        except RanksError as error:
            self._close(call)
            raise self._failure(call.what, error) from call.error()
        except CheckpointError:
            self._close(call)
            raise
        self._close(call)
        return True

    def finish_alone(self, call: SharedCall) -> None:
        """A call is over here, and this rank will not ask the others about it."""
        if self._prefix is not None:
            self._cast(call, call.result.exception(0))
            self._coordinate().leave(self._tag(call))
        self._close(call)

    def give_up(self, call: SharedCall, failure: CheckpointError) -> None:
        """Close a call that other ranks may still ask about: it failed here. Never raises."""
        try:
            if not self._alone:
                coordinator, _ = self._join()
                tag = self._tag(call)
                self._cast(call, failure)
                if self.is_leader:
                    # A rank that is behind gets the answers to its earlier looks that this rank got.
                    coordinator.look(f"{tag}/look", call.looks, lambda: True, 0)
                    call.looks += 1
                    coordinator.refuse(tag, ranks_failed({0: str(failure)}))
                else:
                    coordinator.leave(tag)
        except CheckpointError as error:
            logger.warning("could not tell the other ranks that %s is over on this one: %s", call.what, error)
        finally:
            self._close(call)

    def run_step(self, name: str, work: Callable[[], Any], what: str, timeout: float = _STEP_SECONDS) -> None:
        """Do a step on all ranks, and wait for all. Call this on all ranks.

        Args:
            name: used once.
            work: the step.
            what: the step, for error texts.
            timeout: seconds to wait for the other ranks.

        Raises:
            RanksError: it failed on a rank; the same on all ranks, with this rank's own error as its cause.
            CheckpointTimeoutError: rank 0 did not decide in time.
        """
        coordinator, watch = self._join()
        tag = f"{self._prefix}/{name}"
        failure: BaseException | None = None
        try:
            work()
        except (KeyboardInterrupt, SystemExit):
            raise  # these wait for no other rank
        except BaseException as error:  # torch's CheckpointException is no Exception
            failure = error
        coordinator.cast(tag, self._place, as_save_error(failure))
        try:
            coordinator.count(tag, self._deadline(timeout), self._check_order, watch)
        except RanksError as error:
            raise self._failure(what, error) from failure

    def total(self, value: int) -> int:
        """The sum over all ranks, for whom this waits. Call this on all ranks.

        Raises:
            CheckpointTimeoutError: not all ranks took part in time.
            RanksError: a rank or the store is.
        """
        coordinator, _ = self._join()
        self._sums += 1
        return int(coordinator.decide(f"{self._prefix}/sum/{self._sums}", value, sum, self._deadline(_STEP_SECONDS)))

    def rest(self) -> None:
        """Send no more heartbeats until there is another call. Call this on all ranks when no call is open."""
        coordinator, self._coordinator, self._watch = self._coordinator, None, None
        if coordinator is not None:
            coordinator.rest()

    def _coordinate(self) -> StoreCoordinator:
        """The coordinator, whose heartbeats begin with the first call."""
        if self._coordinator is None:
            self._coordinator = StoreCoordinator(self._store, HEARTBEAT_SECONDS, stall_timeout=math.inf)
        return self._coordinator

    def _join(self) -> tuple[StoreCoordinator, FailureDetector]:
        """Take part with the other ranks: the n-th queue of each rank that does so belongs together."""
        coordinator = self._coordinate()
        if self._watch is None:
            self._watch = FailureDetector(self._store, HEARTBEAT_SECONDS, None)
        if self._prefix is None:
            self._place = self._order.join()
            self._prefix = str(self._store.add(f"joined-by-{self._store.rank}", 1))
            self._alone = False
            for call in self._open:
                self._cast_when_done(call)
        return coordinator, self._watch

    def _tag(self, call: SharedCall) -> str:
        return f"{self._prefix}/call/{call.number}"

    def _deadline(self, timeout: float) -> float:
        return time.monotonic() + timeout + (0 if self.is_leader else GRACE_SECONDS)

    def _cast_when_done(self, call: SharedCall) -> None:
        def cast(result: Future[Any]) -> None:
            try:
                if not result.cancelled():
                    self._cast(call, result.exception(0))
            except CheckpointError as error:
                logger.warning("could not tell rank 0 how %s went on this rank: %s", call.what, error)

        call.result.add_done_callback(cast)

    def _cast(self, call: SharedCall, error: BaseException | None) -> None:
        with self._casting:
            is_cast, call.is_cast = call.is_cast, True
            if not is_cast:
                self._coordinate().cast(self._tag(call), self._place, as_save_error(error), self._cast_store)

    def _check_order(self, places: list[list[int]]) -> None:
        """Refuse ranks that take part with another queue than rank 0; looked for until it was right once."""
        if self._is_in_place:
            return
        # Ranks may have queues of their own that wait, which says nothing about those before.
        strangers = [
            rank
            for rank, (passed, before, waiting) in enumerate(places)
            if passed != places[0][0] or (before != places[0][1] and waiting == places[0][2])
        ]
        if strangers:
            text = "asked about another queue than rank 0: all ranks must ask about their queues in the same order"
            raise ranks_failed(dict.fromkeys(strangers, text))
        self._is_in_place = True

    def _failure(self, what: str, error: RanksError) -> RanksError:
        code = "" if error.errno is None else f" ({errno.errorcode.get(error.errno, f'errno {error.errno}')})"
        text = f"{what} did not succeed on all {self.world_size} ranks{code}. {error}"
        return RanksError(text, error.errno, error.failures, error.causes)

    def _close(self, call: SharedCall) -> None:
        with self._casting:
            call.is_cast = True
        self._open.remove(call)
        if call.looks and self._coordinator is not None:
            try:
                self._coordinator.leave(f"{self._tag(call)}/look")
            except RanksError as error:
                logger.debug("%s", error)


class QueueOrder:
    """In which order the queues of this rank were made and used. Kept in the store, where no object owns it.

    Args:
        store: that all queues of the rank share.
        made: when this queue was made.
    """

    def __init__(self, store: RankStore, made: int) -> None:
        self._store = store
        self._made = made
        self._key = f"order/{store.rank}"

    def wait(self) -> None:
        """This queue has calls, about which no rank was asked yet."""
        self._update("waiting")

    def forget(self) -> None:
        """This queue is this rank's alone."""
        self._update(None)

    def join(self) -> list[int]:
        """This queue is used with those of the other ranks.

        Returns:
            Where it stands, which must be the same on all ranks: how many that were made later were used before; how
            many that were made before are waiting; how many are waiting.
        """
        order = self._update("joined")
        waiting = order["waiting"]
        passed = sum(made > self._made for made in order["joined"])
        return [passed, sum(made < self._made for made in waiting), len(waiting)]

    def _update(self, state: str | None) -> dict[str, list[int]]:
        data = self._store.peek(self._key)
        order: dict[str, list[int]] = {"waiting": [], "joined": []} if data is None else json.loads(data)
        order["waiting"] = [made for made in order["waiting"] if made != self._made]
        if state is not None:
            order[state] = sorted({*order[state], self._made})[-_REMEMBERED:]
        self._store.set(self._key, json.dumps(order).encode())
        return order


class Peers:
    """The other ranks, as one caller or queue sees them: none, until it is used where there are several."""

    def __init__(self) -> None:
        self._made = time.monotonic_ns()
        self._group: weakref.ref[Any] | None = None  # weak, so that destroy_process_group() is not held up
        #: The session of the last schedule, if any.
        self.current: PeerSession | None = None

    def session(self) -> PeerSession | None:
        """The session with the ranks of the present default process group; None where there is one rank."""
        dist = distributed()
        group = None if dist is None else dist.group.WORLD
        previous = None if self._group is None else self._group()
        if group is not previous or group is None:
            store = RankStore.shared("callers")
            self.current = None if store is None else PeerSession(store, self._made)
            self._group = None if group is None else weakref.ref(group)
        return self.current

    def rest(self) -> None:
        """No call is open any more; see `PeerSession.rest`."""
        if self.current is not None:
            self.current.rest()


def this_rank() -> int:
    """The number of this rank; 0 without `torch.distributed`."""
    dist = distributed()
    return 0 if dist is None else int(dist.get_rank())


def as_save_error(error: BaseException | None) -> Exception | None:
    """An error of this package, whose message names the type of the original one."""
    if error is None or isinstance(error, CheckpointError):
        return error
    plain = describe_failure(error)
    return CheckpointSaveError(plain["error"], plain["errno"])
