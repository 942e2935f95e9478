"""Agreement of many ranks over their shared store: a few small messages a rank and question, no collective.

A question's keys are `<tag>/said/<rank>`, a counter of them, `<tag>/answer`, and where the answer differs from rank to
rank `<tag>/part/<rank>`. The leading rank waits for the
counter, decides, and answers; errors travel as name and text. Old questions are removed by the leading rank, once
every rank has read the answer. Protocol: RELIABILITY 6.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import (
    CheckpointError,
    CheckpointTimeoutError,
    RanksError,
    error_as_plain,
    error_from_plain,
    name_ranks,
    ranks_failed,
)
from .calls import AnotherCall, Call, Lookout, Place
from .coordinator import Coordinator
from .heartbeat import Heartbeat, Watch, Work
from .messages import pack, unpack
from .rank_store import RankStore
from .votes import count_votes, missing, said
from .world import World

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
            store.set(f"{tag}/answer", pack({"error": error_as_plain(failure), "about": call.about}))
            store.add(f"{tag}/count", self.world_size)  # the leading rank, when it comes, waits for nobody
        elif self.leads:
            store.set(f"{tag}/answer", pack({"error": error_as_plain(failure)}))
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
        store = self._store()
        mine, failure = None, None
        with self._work.under_way(progress):
            try:
                mine = work()
            except Exception as error:
                failure = error
            self._say(store, tag, {"work": mine} if failure is None else {"error": error_as_plain(failure)})
            if failure is not None:
                store.add(f"{tag}/failed", 1)
        try:
            if self.leads:
                votes: list[Any] = []
                watch = self._watch(store, self._stall_timeout)
                self._answer(store, tag, lambda: votes.extend(count_votes(store, tag, watch, deadline)))
                return votes
            self._learn(store, tag, deadline)
            return []
        except RanksError as error:
            raise error from failure

    def close(self) -> None:
        """Give no more signs of life; the keys of the last questions stay, for ranks that have yet to read them."""
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
            return name_ranks(ranks).lower() if ranks else "the last rank"  # which came just now

        store.wait_until(all_said, deadline, lambda: f"{absent()} to take part in '{tag}'")

    def _answer(self, store: RankStore, tag: str, action: Callable[[], Any]) -> Any:
        try:
            result = action()
        except Exception as error:
            store.set(f"{tag}/answer", pack({"error": error_as_plain(error)}))
            self._tidy(store, tag)
            raise
        store.set(f"{tag}/answer", pack({"result": result}))
        self._tidy(store, tag)
        return result

    def _learn(self, store: RankStore, tag: str, deadline: float) -> Any:
        return self._read_answer(store, tag, self._await_answer(store, tag, deadline))

    def _await_answer(self, store: RankStore, tag: str, deadline: float, lookout: Lookout | None = None) -> bytes:
        found: list[bytes] = []
        watch = self._watch(store, None)

        def answered() -> bool:
            data = store.peek(f"{tag}/answer")
            if data is not None:
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
        raise error_from_plain(answer["error"])

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
