"""Agreement of many ranks over their shared store: a few small messages a rank and question, no collective.

A question's keys are `<tag>/said/<rank>`, a counter of them, `<tag>/answer`, and where the answer differs from rank to
rank `<tag>/part/<rank>`. The leading rank waits for the
counter, decides, and answers; errors travel as name and text. Old questions are removed by the leading rank, once
every rank has read the answer. Protocol: RELIABILITY 6.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError, CheckpointTimeoutError, RanksError
from .calls import AnotherCall, Call, Lookout, Place
from .coordinator import Coordinator, named, ranks_failed
from .heartbeat import RESTING, Heartbeat, Watch, Work
from .messages import as_error, as_plain, pack, unpack
from .rank_store import RankStore
from .votes import count_votes, missing, said
from .world import World

logger = logging.getLogger(__name__)

#: So many questions are kept for ranks that have not read the answer.
_KEPT = 64
#: A rank whose time is up waits so much longer for a decision that the leading one has begun to make.
_ANSWER_SECONDS = 10.0


class StoreCoordinator(Coordinator):
    """Agreement over a `RankStore`.

    Args:
        store: this rank's connection; owned by the coordinator from now on. Other threads get clones of it.
        heartbeat_timeout: seconds without a sign of life after which a rank counts as gone.
        stall_timeout: seconds without a written byte after which a rank that lives counts as hung.
    """

    def __init__(self, store: RankStore, heartbeat_timeout: float = 30.0, stall_timeout: float = 300.0) -> None:
        self.rank = store.rank
        self.world_size = store.world_size
        self.world = World()
        self._first = store
        self._connections = threading.local()
        self._connections.store = store  # of the thread that makes this, which is the one that saves
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._answered: deque[str] = deque()
        self._tidying = threading.Lock()
        self._work = Work()
        self._heart = Heartbeat(store.clone(), self._work.sign, heartbeat_timeout)
        self._heart.__enter__()
        # The thread of the heart knows nothing of this object, and ends with it.
        self._stop_heart = weakref.finalize(self, self._heart.stop)

    def at_step(self, step: int) -> None:
        """See `Coordinator.at_step`."""
        self._work.place = self._work.place.at(step)

    def resumed(self, step: int) -> None:
        """See `Coordinator.resumed`."""
        self._work.place = Place(self._work.place.turn + 1, step)

    def pool(
        self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, call: Call | None = None
    ) -> Any:
        """See `Coordinator.pool`."""
        return self._ask(tag, value, decide, deadline, self._answer, call)

    def deal(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """See `Coordinator.deal`."""

        def hand_out(store: RankStore, tag: str, collect: Callable[[], Any]) -> Any:
            mine: list[Any] = []

            def parts() -> None:
                own, *others = collect()
                mine.append(own)
                for rank, part in enumerate(others, 1):
                    store.set(f"{tag}/part/{rank}", pack(part))

            self._answer(store, tag, parts)
            return mine[0]

        told = self._ask(tag, value, decide, deadline, hand_out)
        return told if self.leads else self._take_part(tag)

    def _ask(
        self,
        tag: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        deadline: float,
        answer: Callable[[RankStore, str, Callable[[], Any]], Any],
        call: Call | None = None,
    ) -> Any:
        """Say something; the leading rank then waits for all and answers, the others wait for the answer."""
        store = self._store()
        if call is not None:
            self._heart.check()
            call = Call(call.name, call.about or f"{self._work.place.turn}/{self._work.place.step}")
        self._say(store, tag, value)
        lookout = None if call is None else self._lookout(store, tag, call)
        failure, data = None, None
        try:
            if self.leads:
                self._await_all(store, tag, deadline, lookout)
            else:
                data = self._await_answer(store, tag, deadline, lookout)
        except (CheckpointTimeoutError, RanksError) as error:
            failure = error if lookout is None else lookout.explain(error)
        if data is None:
            # Who closes the question first decides: to answer it, or to give it up. So no rank goes on without the
            # others.
            first = store.add(f"{tag}/closed", 1) == 1
            if first and failure is None:
                return answer(store, tag, lambda: decide(said(store, tag, range(self.world_size))))
            if self.leads and call is None and failure is None:
                failure = CheckpointTimeoutError(f"A rank gave up waiting for rank 0 to take part in '{tag}'.")
            if failure is not None and (first or (call is None and (self.leads or isinstance(failure, RanksError)))):
                self._give_up(store, tag, failure, call)
                raise failure
            try:
                data = self._await_answer(store, tag, time.monotonic() + _ANSWER_SECONDS)
            except CheckpointTimeoutError as error:
                raise failure or error from None
        return self._read_answer(store, tag, data, call)

    def _give_up(self, store: RankStore, tag: str, failure: CheckpointError, call: Call | None) -> None:
        """Close a question with an error; that of a call is for those alone who asked it for the same call."""
        if call is not None:
            store.set(f"{tag}/answer", pack({"error": as_plain(failure), "about": call.about}))
            store.add(f"{tag}/count", self.world_size)  # the leading rank, when it comes, waits for nobody
        elif self.leads:
            store.set(f"{tag}/answer", pack({"error": as_plain(failure)}))
        self._leave(store, tag)

    def lead(self, tag: str, action: Callable[[], Any], deadline: float, call: Call | None = None) -> Any:
        """See `Coordinator.lead`."""
        store = self._store()
        if self.leads:
            return self._answer(store, tag, action)
        if call is None:
            return self._learn(store, tag, deadline)
        lookout = Lookout(store, call, self._work.place, lambda: [0], lambda: [0])
        try:
            return self._read_answer(store, tag, self._await_answer(store, tag, deadline, lookout))
        except CheckpointTimeoutError as error:
            raise lookout.explain(error) from None

    def vote(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """See `Coordinator.vote`."""
        result, failure = None, None
        with self._work.under_way(progress):
            try:
                result = work()
            except Exception as error:
                failure = error
            self.cast(tag, result, failure)
        try:
            return self.count(tag, deadline)
        except RanksError as error:
            raise error from failure

    def cast(self, tag: str, result: Any, failure: Exception | None = None, store: RankStore | None = None) -> None:
        """The first half of `vote`: send how this rank's part went. Does not wait.

        Args:
            tag: of this question.
            result: of this rank's part.
            failure: of this rank's part.
            store: a connection to use; None: this thread's.
        """
        store = self._store() if store is None else store
        self._say(store, tag, {"work": result} if failure is None else {"error": as_plain(failure)})
        if failure is not None:
            store.add(f"{tag}/failed", 1)

    def is_counted(self, tag: str, watch: Watch) -> bool:
        """On the leading rank: whether `count` has nothing to wait for. `watch` is kept from one look to the next."""
        store = self._store()
        if store.add(f"{tag}/count", 0) >= self.world_size or store.add(f"{tag}/failed", 0):
            return True
        return bool(watch.lost(lambda: missing(store, tag)))

    def count(
        self,
        tag: str,
        deadline: float,
        check: Callable[[list[Any]], None] = lambda results: None,
        watch: Watch | None = None,
    ) -> list[Any]:
        """The second half of `vote`: wait for the votes of all ranks, or the first failure.

        Args:
            tag: of this question.
            deadline: monotonic seconds.
            check: called on the leading rank with all results; what it raises is raised on all ranks.
            watch: of the heartbeats; None: one for this question alone.

        Raises:
            RanksError: as `vote`.
        """
        store = self._store()
        if not self.leads:
            self._learn(store, tag, deadline)
            return []
        results: list[Any] = []

        def decide() -> None:
            results.extend(count_votes(store, tag, watch or self._watch(store, self._stall_timeout), deadline))
            check(results)

        self._answer(store, tag, decide)
        return results

    def look(self, tag: str, number: int, is_over: Callable[[], bool], deadline: float) -> bool:
        """Whether something is over, the same on all ranks in their look of the same number.

        A rank waits only while the leading one has yet to make this look. All ranks call `leave` after the last.

        Args:
            tag: of these looks, however many there are.
            number: of this look, from 0.
            is_over: asked on the leading rank; when it returned True, that was its last look.
            deadline: monotonic seconds.
        """
        store = self._store()
        if self.leads:
            over = is_over()
            store.set(f"{tag}/answer", pack({"result": [number, over]}))
            return over
        data = self._await_answer(store, tag, deadline, reached=lambda data: unpack(data)["result"][0] >= number)
        return bool(unpack(data)["result"] == [number, True])

    def refuse(self, tag: str, failure: CheckpointError) -> None:
        """On the leading rank: answer a question with an error, whatever the ranks send. Does not wait."""
        store = self._store()
        store.set(f"{tag}/answer", pack({"error": as_plain(failure)}))
        self._tidy(store, tag)

    def leave(self, tag: str) -> None:
        """Nothing more is asked here about this question; its keys are removed when all ranks have left it."""
        self._leave(self._store(), tag)

    def rest(self) -> None:
        """As `close`, but the other ranks do not count this one as dead: it may start another coordinator."""
        self.close()
        try:
            self._first.set(f"beat/{self.rank}", RESTING)
        except RanksError as error:
            logger.debug("%s", error)

    def close(self) -> None:
        """Send no more heartbeats; the keys of the last questions stay, for ranks that have yet to read them."""
        if self._stop_heart.detach() is not None:
            self._work.place = Place(closed=True)
            self._heart.end()
        self._connections = threading.local()

    def _watch(self, store: RankStore, stall_timeout: float | None) -> Watch:
        """On the leading rank of all others, on the others of the leading one."""
        watched = range(1, self.world_size) if self.leads else [0]
        return Watch(store, watched, self._heartbeat_timeout, stall_timeout)

    def _store(self) -> RankStore:
        """This thread's connection: one that waits must not hold up another thread's."""
        store: RankStore | None = getattr(self._connections, "store", None)
        if store is None:
            store = self._connections.store = self._first.clone()
        return store

    def _say(self, store: RankStore, tag: str, value: Any) -> None:
        store.set(f"{tag}/said/{self.rank}", pack(value))
        store.add(f"{tag}/count", 1)

    def _lookout(self, store: RankStore, tag: str, call: Call) -> Lookout:
        """After this rank has spoken. The leading rank looks after all others, and they after the leading one."""

        def silent() -> list[int]:
            return missing(store, tag) if self.leads else [] if store.has(f"{tag}/said/0") else [0]

        return Lookout(store, call, self._work.place, lambda: missing(store, tag), silent)

    def _await_all(self, store: RankStore, tag: str, deadline: float, lookout: Lookout | None) -> None:
        """On the leading rank: return when every rank has spoken."""
        watch = self._watch(store, None)

        def all_said() -> bool:
            if store.add(f"{tag}/count", 0) >= self.world_size:
                return True
            lost = watch.lost(lambda: missing(store, tag))
            if lost:
                raise ranks_failed(lost, causes=watch.causes(lost))
            if lookout is not None:
                lookout.look()
            return False

        def absent() -> str:
            ranks = missing(store, tag)
            return named(ranks).lower() if ranks else "the last rank"  # which came just now

        store.wait_until(all_said, deadline, lambda: f"{absent()} to take part in '{tag}'")

    def _answer(self, store: RankStore, tag: str, action: Callable[[], Any]) -> Any:
        try:
            result = action()
        except Exception as error:
            store.set(f"{tag}/answer", pack({"error": as_plain(error)}))
            self._tidy(store, tag)
            raise
        store.set(f"{tag}/answer", pack({"result": result}))
        self._tidy(store, tag)
        return result

    def _learn(self, store: RankStore, tag: str, deadline: float) -> Any:
        return self._read_answer(store, tag, self._await_answer(store, tag, deadline))

    def _await_answer(
        self,
        store: RankStore,
        tag: str,
        deadline: float,
        lookout: Lookout | None = None,
        reached: Callable[[bytes], bool] = lambda data: True,
    ) -> bytes:
        found: list[bytes] = []
        watch = self._watch(store, None)

        def answered() -> bool:
            data = store.peek(f"{tag}/answer")
            if data is not None and reached(data):
                found.append(data)
                return True
            lost = watch.lost(lambda: [0])
            if lost:
                raise ranks_failed(lost, causes=watch.causes(lost))
            if lookout is not None:
                try:
                    lookout.look()
                except RanksError:
                    if not store.has(f"{tag}/answer"):  # it has gone on because it has answered
                        raise
            return False

        store.wait_until(answered, deadline, lambda: f"rank 0 to decide '{tag}'")
        return found[0]

    def _read_answer(self, store: RankStore, tag: str, data: bytes, call: Call | None = None) -> Any:
        self._leave(store, tag)
        answer = unpack(data)
        if "error" not in answer:
            return answer["result"]
        if call is not None and answer.get("about", call.about) != call.about:
            raise AnotherCall
        raise as_error(answer["error"])

    def _leave(self, store: RankStore, tag: str) -> None:
        """This rank needs the answer no more."""
        if self.leads:
            self._tidy(store, tag)
        else:
            store.add(f"{tag}/left", 1)

    def _take_part(self, tag: str) -> Any:
        """This rank's part of the answer, which nobody else reads."""
        store = self._store()
        key = f"{tag}/part/{self.rank}"
        (data,) = store.read([key])
        store.delete([key])
        return unpack(data)

    def _tidy(self, store: RankStore, tag: str) -> None:
        """Remove the questions that every rank has read, or that are so old that a rank must be gone."""
        with self._tidying:
            old, self._answered = self._answered, deque()
            for number, question in enumerate(old):
                if len(old) - number <= _KEPT and store.add(f"{question}/left", 0) < self.world_size - 1:
                    self._answered.append(question)
                    continue
                keys = [f"{question}/said/{rank}" for rank in range(self.world_size)]
                store.delete(
                    [*keys, *(f"{question}/{name}" for name in ("count", "failed", "closed", "answer", "left"))]
                )
            self._answered.append(tag)
