"""Agreement of many ranks over their shared store: a few small messages a rank and question, no collective.

A question's keys are `<tag>/posts/<rank>`, a counter of them, `<tag>/answer`, and where the answer differs by rank
`<tag>/part/<rank>`. The leader waits for the counter, decides, and answers; errors travel as name and text. The leader
removes old questions once every rank has read the answer.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import (
    CheckpointError,
    CheckpointTimeoutError,
    RanksError,
    error_as_plain,
    error_from_plain,
    ranks_failed,
)
from .calls import Lookout
from .coordinator import Coordinator
from .heartbeat import RESTING, FailureDetector, Heartbeat, Place
from .question import Question, unpack
from .rank_store import RankStore

logger = logging.getLogger(__name__)

#: So many questions are kept for ranks that have not read the answer.
_KEPT = 64
#: A rank whose time is up waits this much longer for a decision that the leader has begun to make.
_ANSWER_SECONDS = 10.0


class _AnotherCall(Exception):
    """A question was withdrawn by a rank that asked it for another call; this one is for the next question."""


class StoreCoordinator(Coordinator):
    """Agreement over a `RankStore`.

    Args:
        store: this rank's connection; owned by the coordinator from now on. Other threads get clones of it.
        heartbeat_timeout: seconds without a heartbeat after which a rank is considered dead.
        stall_timeout: seconds without a written byte after which a live rank is considered hung.
    """

    def __init__(self, store: RankStore, heartbeat_timeout: float = 30.0, stall_timeout: float = 300.0) -> None:
        super().__init__(store.rank, store.world_size)
        self._first = store
        self._connections = threading.local()
        self._connections.store = store  # for the thread that makes this, which is the one that saves
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._answered: deque[str] = deque()
        self._tidying = threading.Lock()
        self._heart = Heartbeat(store.clone(), heartbeat_timeout)
        # The heartbeat thread has no reference to this object, and ends with it.
        self._stop_heart = weakref.finalize(self, self._heart.stop)

    def at_step(self, step: int) -> None:
        """Note the step for the heartbeat."""
        self._heart.place = self._heart.place.at(step)

    def resumed(self, step: int) -> None:
        """Note the step, and that it is an earlier one."""
        self._heart.place = Place(self._heart.place.turn + 1, step)

    def decide(self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float) -> Any:
        """Post a value; the leader then waits for all and answers, the others wait for the answer."""
        return self._decide(self._question(tag), value, decide, deadline)

    def meet(
        self,
        name: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        deadline: float,
        about: str | None = None,
    ) -> Any:
        """As `decide`, with the next number, until the question is not one that was withdrawn."""
        self._heart.check()
        place = self._heart.place
        about = about or f"{place.turn}/{place.step}"
        while True:
            self.meetings[name] += 1
            question = self._question(f"{name}/{self.meetings[name]}")
            lookout = Lookout(question.store, name, place, question.missing, partial(self._silent, question))
            try:
                return self._decide(question, value, decide, deadline, lookout, about)
            except _AnotherCall:
                logger.debug("%s was withdrawn", question.tag)

    def _decide(
        self,
        question: Question,
        value: Any,
        decide: Callable[[list[Any]], Any],
        deadline: float,
        lookout: Lookout | None = None,
        about: str | None = None,
    ) -> Any:
        """For a meeting with its lookout, and what it is about."""
        question.post(value)
        failure, data = None, None
        try:
            if self.is_leader:
                self._await_all(question, deadline, lookout)
            else:
                data = self._await_answer(question, deadline, lookout)
        except (CheckpointTimeoutError, RanksError) as error:
            failure = error if lookout is None else lookout.explain(error)
        if data is None:
            # The first rank to close the question decides whether it is answered or given up, so that no rank goes on
            # without the others.
            first = question.count("closed", 1) == 1
            if first and failure is None:
                return self._answer(question, lambda: decide(question.values(range(self.world_size))))
            if self.is_leader and about is None and failure is None:
                failure = CheckpointTimeoutError(f"A rank gave up waiting for rank 0 to take part in '{question.tag}'.")
            may_give_up = about is None and (self.is_leader or isinstance(failure, RanksError))
            if failure is not None and (first or may_give_up):
                self._give_up(question, failure, about)
                raise failure
            try:
                data = self._await_answer(question, time.monotonic() + _ANSWER_SECONDS)
            except CheckpointTimeoutError as error:
                raise failure or error from None
        return self._read_answer(question, data, about)

    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """The leader gives each rank its part before it answers."""
        question, own = self._question(tag), []

        def give_parts(values: list[Any]) -> None:
            parts = decide(values)
            own.append(parts[0])
            for rank, part in enumerate(parts[1:], 1):
                question.give_part(rank, part)

        self.decide(tag, value, give_parts, deadline)
        return own[0] if self.is_leader else question.take_part()

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """The leader acts and answers, the others wait for the answer."""
        question = self._question(tag)
        if self.is_leader:
            return self._answer(question, action)
        lookout = None
        if name is not None:
            lookout = Lookout(question.store, name, self._heart.place, lambda: [0], lambda: [0])
        try:
            return self._read_answer(question, self._await_answer(question, deadline, lookout))
        except CheckpointTimeoutError as error:
            if lookout is None:
                raise
            raise lookout.explain(error) from None

    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Each rank posts what its part returned or raised; the leader answers with an error or with nothing."""
        result, failure = None, None
        self._heart.progress = progress
        try:
            result = work()
        except Exception as error:
            failure = error
        finally:
            self._heart.progress = None
        self.cast(tag, result, failure)
        try:
            return self.count(tag, deadline)
        except RanksError as error:
            raise error from failure

    def cast(self, tag: str, result: Any, failure: Exception | None = None, store: RankStore | None = None) -> None:
        """The first half of `all_succeed`: post how this rank's part went. Does not wait.

        Args:
            tag: of this question.
            result: of this rank's part.
            failure: of this rank's part.
            store: a connection to use; None: this thread's.
        """
        question = Question(self._store() if store is None else store, tag)
        question.post({"work": result} if failure is None else {"error": error_as_plain(failure)})
        if failure is not None:
            question.count("failed", 1)

    def is_counted(self, tag: str, watch: FailureDetector) -> bool:
        """On the leader: whether `count` has nothing to wait for. `watch` is kept from one look to the next."""
        question = self._question(tag)
        if question.count("count") >= self.world_size or question.count("failed"):
            return True
        return bool(watch.dead_ranks(question.missing))

    def count(
        self,
        tag: str,
        deadline: float,
        check: Callable[[list[Any]], None] = lambda results: None,
        watch: FailureDetector | None = None,
    ) -> list[Any]:
        """The second half of `all_succeed`: wait for the votes of all ranks, or the first failure.

        Args:
            tag: of this question.
            deadline: monotonic seconds.
            check: called on the leader with all results; what it raises is raised on all ranks.
            watch: of the heartbeats; None: one for this question alone.

        Raises:
            RanksError: as `all_succeed`.
        """
        results: list[Any] = []

        def collect() -> None:
            question = self._question(tag)
            results.extend(question.outcomes(watch or self._watch(question.store, self._stall_timeout), deadline))
            check(results)

        self.run_on_leader(tag, collect, deadline)
        return results

    def look(self, tag: str, number: int, is_over: Callable[[], bool], deadline: float) -> bool:
        """Whether something is over, the same on all ranks in their look of the same number.

        A rank waits only while the leader has yet to make this look. All ranks call `leave` after the last.

        Args:
            tag: of these looks, however many there are.
            number: of this look, from 0.
            is_over: asked on the leader; when it returned True, that was its last look.
            deadline: monotonic seconds.
        """
        question = self._question(tag)
        if self.is_leader:
            over = is_over()
            question.answer(result=[number, over])
            return over
        data = self._await_answer(question, deadline, reached=lambda data: unpack(data)["result"][0] >= number)
        return bool(unpack(data)["result"] == [number, True])

    def refuse(self, tag: str, failure: CheckpointError) -> None:
        """On the leader: answer a question with an error, whatever the ranks post. Does not wait."""
        question = self._question(tag)
        question.answer(error=error_as_plain(failure))
        self._tidy(question)

    def leave(self, tag: str) -> None:
        """Nothing more is asked here about this question; its keys are removed when all ranks have left it."""
        self._leave(self._question(tag))

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
            self._heart.place = Place(closed=True)
            self._heart.end()
        self._connections = threading.local()

    def _store(self) -> RankStore:
        """This thread's connection: one that waits must not hold up another thread's."""
        store: RankStore | None = getattr(self._connections, "store", None)
        if store is None:
            store = self._connections.store = self._first.clone()
        return store

    def _question(self, tag: str) -> Question:
        return Question(self._store(), tag)

    def _watch(self, store: RankStore, stall_timeout: float | None) -> FailureDetector:
        """On the leader of all other ranks, on the others of the leader."""
        watched = range(1, self.world_size) if self.is_leader else [0]
        return FailureDetector(store, watched, self._heartbeat_timeout, stall_timeout)

    def _silent(self, question: Question) -> list[int]:
        """The ranks that have not posted, of those that this one looks after."""
        return question.missing() if self.is_leader else [] if question.has_posted(0) else [0]

    def _await_all(self, question: Question, deadline: float, lookout: Lookout | None) -> None:
        """On the leader: return when every rank has posted."""
        watch = self._watch(question.store, None)

        def all_posted() -> bool:
            if question.count("count") >= self.world_size:
                return True
            _raise_lost(watch, question.missing)
            if lookout is not None:
                lookout.look()
            return False

        question.store.wait_until(
            all_posted, deadline, lambda: f"{question.missing_names()} to take part in '{question.tag}'"
        )

    def _await_answer(
        self,
        question: Question,
        deadline: float,
        lookout: Lookout | None = None,
        reached: Callable[[bytes], bool] = lambda data: True,
    ) -> bytes:
        watch, key, answer = self._watch(question.store, None), f"{question.tag}/answer", []

        def is_answered() -> bool:
            data = question.store.peek(key)
            if data is not None and reached(data):
                answer.append(data)
                return True
            _raise_lost(watch, lambda: [0])
            if lookout is not None:
                try:
                    lookout.look()
                except RanksError:
                    if not question.store.has(key):  # rank 0 may have moved on because it has answered
                        raise
            return False

        question.store.wait_until(is_answered, deadline, lambda: f"rank 0 to decide '{question.tag}'")
        return answer[0]

    def _answer(self, question: Question, action: Callable[[], Any]) -> Any:
        try:
            result = action()
        except Exception as error:
            question.answer(error=error_as_plain(error))
            self._tidy(question)
            raise
        question.answer(result=result)
        self._tidy(question)
        return result

    def _read_answer(self, question: Question, data: bytes, about: str | None = None) -> Any:
        self._leave(question)
        answer = unpack(data)
        if "error" not in answer:
            return answer["result"]
        if about is not None and answer.get("about", about) != about:
            raise _AnotherCall
        raise error_from_plain(answer["error"])

    def _give_up(self, question: Question, failure: CheckpointError, about: str | None) -> None:
        """Close a question with an error; that of a meeting is only for ranks that ask it about the same."""
        if about is not None:
            question.answer(error=error_as_plain(failure), about=about)
            question.count("count", self.world_size)  # when the leader comes, it must not wait
        elif self.is_leader:
            question.answer(error=error_as_plain(failure))
        self._leave(question)

    def _leave(self, question: Question) -> None:
        """This rank needs the answer no more."""
        if self.is_leader:
            self._tidy(question)
        else:
            question.count("left", 1)

    def _tidy(self, question: Question) -> None:
        """Remove the questions that every rank has read, or that are so old that a rank must be dead."""
        with self._tidying:
            old, self._answered = self._answered, deque()
            for number, tag in enumerate(old):
                earlier = Question(question.store, tag)
                if len(old) - number <= _KEPT and earlier.count("left") < self.world_size - 1:
                    self._answered.append(tag)
                else:
                    earlier.delete()
            self._answered.append(question.tag)


def _raise_lost(watch: FailureDetector, missing: Callable[[], list[int]]) -> None:
    """Raise RanksError if one of the missing ranks is dead."""
    lost = watch.dead_ranks(missing)
    if lost:
        raise ranks_failed(lost, causes=watch.causes(lost))
