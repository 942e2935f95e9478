"""Agreement of many ranks through their shared store: a few small messages per rank and question, no collectives.

The keys of a question are `<tag>/posts/<rank>`, a counter of posts, `<tag>/answer`, and `<tag>/part/<rank>` if the
answer differs by rank. The leader waits for the counter, decides, and answers; errors are sent as name and text.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import CheckpointError, CheckpointTimeoutError, RanksError, error_as_plain, error_from_plain
from .coordinator import Coordinator
from .heartbeat import RESTING, FailureDetector, Heartbeat, Place
from .question import AnsweredQuestions, Lookout, Question, pack, unpack
from .rank_store import RankStore

logger = logging.getLogger("ckpt_component.coordination")

#: Extra seconds for which a rank past its deadline waits for a decision that the leader has begun to make.
_ANSWER_SECONDS = 10.0


class _AnotherCall(Exception):
    """The question was withdrawn by a rank that asked it for another call; this call needs the next question."""


class StoreCoordinator(Coordinator):
    """Agreement over a `RankStore`.

    Args:
        store: this rank's connection; owned by the coordinator from now on. Other threads get clones of it.
        heartbeat_timeout: seconds without a heartbeat after which a rank is considered dead
        stall_timeout: seconds without a written byte after which a live rank is considered hung
    """

    def __init__(self, store: RankStore, heartbeat_timeout: float = 30.0, stall_timeout: float = 300.0) -> None:
        super().__init__(store.rank, store.world_size, store.outside)
        self._first = store
        self._connections = self.outside.thread_values()
        self._connections.store = store  # for the thread that constructs this, which also calls save()
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._answered = AnsweredQuestions(self.outside.lock())
        self._heartbeat = Heartbeat(store.clone(), heartbeat_timeout)
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        # The heartbeat thread holds no reference to this object, and ends when it is collected.
        self._stop_heartbeat = weakref.finalize(self, self._heartbeat.stop)

    def at_step(self, step: int) -> None:
        """Record the step for the heartbeat."""
        self._heartbeat.place = self._heartbeat.place.at(step)

    def resumed(self, step: int) -> None:
        """Record that training continues from an earlier step."""
        self._heartbeat.place = Place(self._heartbeat.place.turn + 1, step)

    def decide(self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float) -> Any:
        """Post a value; the leader waits for all values and answers, the others wait for the answer."""
        return self._decide(self._question(tag, deadline), value, decide, deadline)

    def meet(
        self, name: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None
    ) -> Any:
        """Like `decide`, with the next number; tries further numbers while questions were withdrawn."""
        self._heartbeat.check()
        place = self._heartbeat.place
        while True:
            self.meetings[name] += 1
            question = self._question(f"{name}/{self.meetings[name]}", deadline)
            lookout = Lookout(question.store, name, place, question.missing, partial(self._silent, question))
            try:
                return self._decide(question, value, decide, deadline, lookout, about or f"{place.turn}/{place.step}")
            except _AnotherCall:
                logger.debug("%s was withdrawn", question.tag)

    def _decide(
        self,
        question: Question,
        value: Any,
        decide: Callable[[list[Any]], Any],
        deadline: float,
        lookout: Lookout | None = None,
        about: str = "",
    ) -> Any:
        failure, data = None, None
        try:
            question.post(value)
            if self.is_leader:
                self._await_all(question, deadline, lookout)
            else:
                data = self._await_answer(question, deadline, lookout, question.absentees)
        except (CheckpointTimeoutError, RanksError) as error:
            failure = error
            if question.store.is_blocked:
                withdraw = partial(self._withdraw, question.tag, error_as_plain(error), about)
                question.store.once_answered(withdraw)
                raise
        if data is None:
            # The first rank to close the question answers it or gives it up, so that none continues without the others.
            if question.close() == 1:
                if failure is None:
                    return self._answer(question, lambda: decide(question.values(range(self.world_size))))
                self._give_up(question, error_as_plain(failure), about)
                raise failure
            try:
                data = self._await_answer(question, self.outside.now() + _ANSWER_SECONDS)
            except CheckpointTimeoutError as error:
                if self.is_leader:  # it may have closed the question itself: others answer it with an error, or not
                    self._give_up(question, error_as_plain(failure or error), about)
                raise failure or error from None
        return self._read_answer(question, data, about)

    def _withdraw(self, tag: str, failure: dict[str, Any], about: str, store: RankStore) -> None:
        """Give a question up as soon as the store answers again, unless it was decided or given up before."""
        question = Question(store, tag)
        if question.count("closed", 1) == 1:
            self._give_up(question, failure, about)
        else:
            question.count("failed", 1)  # so that rank 0 removes the post, which it may be about to read
            self._leave(question, answered=False)

    def _give_up(self, question: Question, failure: dict[str, Any], about: str) -> None:
        """Answer a question, that this rank has closed, with this rank's error."""
        question.answer(error=failure, about=about)
        question.count("count", self.world_size)  # so that the leader does not wait for the posts
        self._leave(question)

    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """The leader gives each rank its part before it answers."""
        question = self._question(tag, deadline)

        def give_parts(values: list[Any]) -> None:
            for rank, part in enumerate(decide(values)):
                question.give_part(rank, part)

        self._decide(question, value, give_parts, deadline)
        return question.take_part()

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """The leader acts and answers, the others wait for the answer."""
        question = self._question(tag, deadline)
        if self.is_leader:
            return self._answer(question, action)
        lookout = None
        if name is not None:
            lookout = Lookout(question.store, name, self._heartbeat.place, lambda: [0], lambda: [0])
        return self._read_answer(question, self._await_answer(question, deadline, lookout))

    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Each rank posts what its part returned or raised; the leader answers with an error or with nothing."""
        result, failure = None, None
        self._heartbeat.progress.append(progress)
        try:
            result = work()
        except Exception as error:
            failure = error
        finally:
            self._heartbeat.progress.remove(progress)
        self.cast(tag, result, failure)
        try:
            return self.count(tag, deadline)
        except RanksError as error:
            raise error from failure

    def cast(self, tag: str, result: Any, failure: Exception | None = None) -> None:
        """The first half of `all_succeed`: post the outcome of this rank's part. Does not wait.

        Args:
            tag: names the question
            result: what this rank's part returned
            failure: what this rank's part raised
        """
        question = self._question(tag)
        try:
            question.post({"work": result} if failure is None else {"error": error_as_plain(failure)})
            if failure is not None:
                question.count("failed", 1)
        except RanksError as error:
            against = partial(_vote_against, tag, error_as_plain(error))
            if question.store.is_blocked:
                question.store.once_answered(against)
                raise
            against(question.store)

    def count(self, tag: str, deadline: float, watch: FailureDetector | None = None) -> list[Any]:
        """The second half of `all_succeed`: wait for the votes of all ranks, or the first failure.

        Args:
            tag: names the question
            deadline: monotonic seconds
            watch: detects dead ranks; None: a new one for this question

        Raises:
            RanksError: as `all_succeed`
        """
        results: list[Any] = []

        def collect() -> None:
            question = self._question(tag, deadline)
            results.extend(question.outcomes(watch or self._detector(self._stall_timeout), deadline))

        self.run_on_leader(tag, collect, deadline)
        return results

    def _leave(self, question: Question, *, answered: bool = True) -> None:
        """This rank has no more use for a question. What was decided does not depend on it, so errors are logged."""
        try:
            if self.is_leader:
                self._answered.add(question)
            else:
                question.leave(answered=answered)
        except (CheckpointTimeoutError, RanksError) as error:
            logger.debug("rank %d leaves keys of '%s' behind: %s", self.rank, question.tag, error)

    def close(self) -> None:
        """Stop the heartbeat. The keys of the last questions stay, for ranks that have not read them yet."""
        if self._stop_heartbeat.detach() is not None:
            self._heartbeat.place = Place(closed=True)
            self._heartbeat.end()
        self._connections = self.outside.thread_values()

    def _store(self) -> RankStore:
        """This thread's connection: a thread that waits must not block another one."""
        store: RankStore | None = getattr(self._connections, "store", None)
        if store is None:
            store = self._connections.store = self._first.clone()
        return store

    def _question(self, tag: str, deadline: float = math.inf) -> Question:
        return Question(self._store().until(deadline), tag)

    def _detector(self, stall_timeout: float | None) -> FailureDetector:
        return FailureDetector(self._store(), self._heartbeat_timeout, stall_timeout, self._seen)

    def _silent(self, question: Question) -> list[int]:
        """The ranks that have not posted, among those that this rank waits for."""
        return question.missing() if self.is_leader else [] if question.has_posted(0) else [0]

    def _await_all(self, question: Question, deadline: float, lookout: Lookout | None) -> None:
        """On the leader: wait until every rank has posted."""
        self._wait(
            question,
            question.has_all,
            question.late,
            deadline,
            question.absentees,
            lookout,
        )

    def _await_answer(
        self,
        question: Question,
        deadline: float,
        lookout: Lookout | None = None,
        what: Callable[[], str] | None = None,
        reached: Callable[[bytes], bool] = lambda data: True,
    ) -> bytes:
        answer: list[bytes] = []

        def is_answered() -> bool:
            data = question.store.peek(f"{question.tag}/answer")
            if data is not None and reached(data):
                answer.append(data)
            return bool(answer)

        what = what or (lambda: f"rank 0 to decide '{question.tag}'")
        self._wait(question, is_answered, lambda: [0], deadline, what, lookout)
        return answer[0]

    def _wait(
        self,
        question: Question,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        deadline: float,
        what: Callable[[], str],
        lookout: Lookout | None,
    ) -> None:
        """Wait until `is_done()`. Raises RanksError if a missing rank is dead or has continued without the call."""
        store = question.store
        detector = FailureDetector(store, self._heartbeat_timeout, None, self._seen)

        def check() -> bool:
            if is_done():
                return True
            detector.check(missing)
            if lookout is not None:
                try:
                    lookout.look()
                except RanksError:
                    if not is_done():  # rank 0 may have moved on because it has answered
                        raise
            return False

        try:
            store.wait_until(check, deadline, what)
        except CheckpointTimeoutError as error:
            raise error if lookout is None or store.is_blocked else lookout.explain(error) from None

    def _answer(self, question: Question, action: Callable[[], Any]) -> Any:
        """On the leader: run an action, and post what it returns or raises for all ranks."""
        try:
            result = action()
        except Exception as error:
            self._post_answer(question, error=error_as_plain(error))
            raise
        else:
            self._post_answer(question, result=result)
        finally:
            self._leave(question)
        return result

    def _post_answer(self, question: Question, **fields: Any) -> None:
        """On the leader: what was done is done, such as a commit, so no error of the store changes the outcome."""
        try:
            question.answer(**fields)
        except (CheckpointTimeoutError, RanksError) as error:
            logger.warning("rank %d could not answer '%s' in time: %s", self.rank, question.tag, error)
            if question.store.is_blocked:
                question.store.once_answered(lambda store: Question(store, question.tag).answer(**fields))

    def _read_answer(self, question: Question, data: bytes, about: str = "") -> Any:
        self._leave(question)
        answer = unpack(data)
        if "error" not in answer:
            return answer["result"]
        if answer.get("about", about) != about:
            raise _AnotherCall
        raise error_from_plain(answer["error"])


def _vote_against(tag: str, failure: dict[str, Any], store: RankStore) -> None:
    """Post that this rank has failed, as its vote may not have been counted: the leader would wait for it."""
    question = Question(store, tag)
    if not store.has(f"{tag}/answer"):
        store.set(f"{tag}/posts/{store.rank}", pack({"error": failure}))
        question.count("failed", 1)


class PolledCoordinator(StoreCoordinator):
    """A coordinator for queues of calls, which may also rest while none is open. Arguments as for its base class."""

    def is_counted(self, tag: str, watch: FailureDetector) -> bool:
        """On the leader: whether `count` would not wait. Pass the same `watch` in every call."""
        return self._question(tag).is_over(watch, {})

    def look(self, tag: str, number: int, is_over: Callable[[], bool], deadline: float) -> bool:
        """Whether something is over; looks of the same number return the same on all ranks.

        A rank waits only until the leader has made this look. All ranks call `leave` after the last one.

        Args:
            tag: names this series of looks
            number: number of this look, from 0
            is_over: called on the leader; once it has returned True, the leader makes no more looks
            deadline: monotonic seconds
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
        self._answered.add(question)

    def leave(self, tag: str) -> None:
        """Declare that this rank has no more use for a question; its keys are removed when all ranks have left it."""
        self._leave(self._question(tag), answered=False)

    def rest(self) -> None:
        """Like `close`, but the other ranks do not consider this one dead: it may start another coordinator."""
        self.close()
        try:
            self._first.until(self.outside.now()).set(f"beat/{self.rank}", RESTING)
        except CheckpointError as error:
            logger.debug("%s", error)
