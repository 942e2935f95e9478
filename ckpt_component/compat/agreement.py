"""How callers on all ranks agree: small messages in the job's own store, no collective, nothing on a device.

Every question is about one call, whose number is the same on all ranks. Every rank says once how the call went there;
rank 0 decides when all have, or when the first one failed; every rank learns the decision; the last one to do so
removes the question's keys. What a look without waiting may tell has to be the same on all ranks, so rank 0 says
with each look what the next look will tell, and how far these announcements go.

Which agreements of the ranks belong together is settled when they are first used together: until then a rank has said
nothing, and one that only ever looks alone never does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..coordination.rank_store import RankStore
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError, RanksError
from .ballots import Ballots, Place
from .life import Life
from .verdict import Verdict

logger = logging.getLogger(__name__)

#: Others wait so much longer for rank 0's decision than rank 0 waits for them.
_GRACE_SECONDS = 15.0
#: After the first rank failed, others that fail in the same moment get this long to be named too.
_COMPANY_SECONDS = 0.2
#: For a question that has no time of its own; `torch.distributed` gives a collective as long.
_SECONDS = 1800.0
#: A wait looks this often at first, and ever more seldom, so that 1,000 ranks do not keep the store busy.
_FIRST_POLL, _LONGEST_POLL = 0.001, 0.2


@dataclass
class Question:
    """How one call went, on all ranks."""

    number: int
    what: str
    outcome: Future[Any]
    timeout: float
    looks: int = 0
    said: bool = False

    @property
    def tag(self) -> str:
        """Of its keys."""
        return f"call/{self.number}"


class Agreement:
    """What one caller or queue agrees on with those of the other ranks. Used by one thread.

    Args:
        store: a connection of its own, with the keys that all callers of the job share.
        join: called when ranks first use it together; returns its place, for all ranks to compare.
    """

    def __init__(self, store: RankStore, join: Callable[[], Place] = lambda: (0, 0, 0)) -> None:
        self._store = store
        self._life = Life(store)
        self._join = join
        #: Only this rank has looked at questions until now.
        self.alone = False
        self._count = 0
        self._sums = 0
        self._open: deque[Question] = deque()
        self._decided: dict[int, Verdict] = {}  # on rank 0

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self._store.world_size

    @property
    def joined(self) -> bool:
        """Whether it was used together with other ranks."""
        return "_ballots" in vars(self)

    @property
    def waits(self) -> bool:
        """Whether there are questions about which nobody was asked, not even this rank."""
        return bool(self._open) and not self.joined and not self.alone

    def look_alone(self) -> None:
        """This rank looks at a question by itself."""
        self.alone = not self.joined

    @cached_property
    def _ballots(self) -> Ballots:
        """From the first use on all ranks together, whose order says what belongs together."""
        self.alone = False
        return Ballots(self._store.own(), self._life.lost, self._join())

    def rest(self) -> None:
        """Give no more signs of life, until the next question. Call this on all ranks when nothing is open."""
        self._life.rest()

    def ask(self, what: str, outcome: Future[Any], timeout: float) -> Question:
        """Open a question, behind those that are open. Waits for nobody.

        Args:
            what: the call, for error texts.
            outcome: how it goes on this rank.
            timeout: seconds that the call may take.
        """
        question = Question(self._count, what, outcome, timeout)
        self._count += 1
        self._open.append(question)
        self._life.begin()
        return question

    def look(self, question: Question, blocking: bool) -> Verdict | None:
        """The verdict about the first open question; None while there is none. Call this on all ranks.

        Without `blocking`, all ranks learn the same in the n-th look at a question, and wait only for a rank 0 that
        is behind by a whole look.

        Args:
            question: closed afterwards if there is a verdict.
            blocking: wait for the verdict.

        Raises:
            CheckpointTimeoutError: rank 0 did not decide in time; the question is closed.
            RanksError: rank 0 or the store is gone; the question is closed.
        """
        self._life.begin()
        try:
            verdict = self._lead(question, blocking) if self._leads else self._follow(question, blocking)
            if verdict is not None:
                self._ballots.leave(question.tag, verdict)
        except CheckpointError:
            self._close(question)
            raise
        question.looks += 1
        if verdict is not None:
            self._close(question)
        return verdict

    def withdraw(self, question: Question, failure: CheckpointSaveError | None) -> None:
        """Close a question without its verdict. Never raises.

        Others are told nothing where they were never asked: this rank looks alone, or nobody did and all went well.

        Args:
            question: open.
            failure: what other ranks are told in case they still ask. None: how the call went here, if that is known.
        """
        try:
            if self.alone or (failure is None and not self.joined):
                return
            if failure is not None:
                self._say(question, failure)
                if self._leads and question.number not in self._decided:
                    # Those who are behind are told in their earlier looks what was told here.
                    self._ballots.decide(question.tag, Verdict({0: str(failure)}, failure.errno, question.looks))
                    self._ballots.announce(question.number + 1, 0)
            elif question.outcome.done():
                self._say(question, question.outcome.exception(0))
            self._ballots.leave(question.tag, None)
        except CheckpointError as error:
            logger.warning("other ranks were not told that %s is over here: %s", question.what, error)
        finally:
            self._close(question)

    def settle(self, step: str, error: BaseException | None, timeout: float = _SECONDS) -> Verdict:
        """Wait for all ranks to be through a step, or for one to have failed in it. Call this on all ranks.

        Args:
            step: its name, used once.
            error: with which it failed here.
            timeout: seconds to wait.

        Returns:
            The same on all ranks.

        Raises:
            CheckpointTimeoutError: rank 0 did not decide in time.
            RanksError: rank 0 or the store is gone.
        """
        self._life.begin()
        self._ballots.tell(step, error)
        if self._leads:
            verdict = self._judge(step, timeout, None)
            self._ballots.decide(step, verdict)
        else:
            verdict = self._learn(step, timeout, None)
        self._ballots.leave(step, verdict)
        return verdict

    def together(self, step: str, work: Callable[[], Any], what: str, timeout: float = _SECONDS) -> None:
        """Do a step on all ranks, and wait for all. Call this on all ranks.

        Args:
            step: its name, used once.
            work: the step.
            what: the step, for error texts.
            timeout: seconds to wait for others.

        Raises:
            RanksError: it failed somewhere; the same on all ranks, with this rank's own error as its cause.
            CheckpointTimeoutError: as `settle`.
        """
        failed: BaseException | None = None
        self._life.begin()
        try:
            work()
        except (KeyboardInterrupt, SystemExit):
            raise  # these wait for nobody
        except BaseException as error:  # torch's CheckpointException is no Exception
            failed = error
        verdict = self.settle(step, failed, timeout)
        told = verdict.to_raise(what, self.world_size, failed)
        if told is not None:
            raise told

    def total(self, value: int) -> int:
        """The sum over all ranks, for whom this waits. Call this on all ranks.

        Raises:
            CheckpointTimeoutError: not all ranks came in time.
            RanksError: the store is gone.
        """
        tag = f"sum/{self._sums}"
        self._sums += 1
        self._ballots.add(tag, value)
        if not _wait(lambda: self._ballots.all_said(tag), time.monotonic() + _SECONDS, None):
            raise CheckpointTimeoutError(f"Not all {self.world_size} ranks took part within {_SECONDS:g} s.")
        total = self._ballots.total(tag)
        self._ballots.leave(tag, Verdict({}))
        return total

    @property
    def _leads(self) -> bool:
        return self._store.rank == 0

    def _lead(self, question: Question, blocking: bool) -> Verdict | None:
        """Rank 0's look: what it told the others before, and then what all may be told in the next look."""
        verdict = self._decided.get(question.number)
        if verdict is None and blocking:
            verdict = replace(self._judge(question.tag, question.timeout, question.outcome), at=question.looks)
            self._decided[question.number] = verdict
            self._ballots.decide(question.tag, verdict)
        self._say_outcomes()
        for later in self._open:
            if later.number in self._decided:
                continue
            found = self._ballots.counted(later.tag)
            if found is None:
                break
            found = replace(found, at=question.looks + 1 if later is question else 0)
            self._decided[later.number] = found
            self._ballots.decide(later.tag, found)
        self._ballots.announce(
            *((question.number, question.looks + 1) if verdict is None else (question.number + 1, 0))
        )
        return verdict

    def _follow(self, question: Question, blocking: bool) -> Verdict | None:
        """Another rank's look: what rank 0 has announced for it."""
        if blocking:
            return self._learn(question.tag, question.timeout, question.outcome)
        self._say_outcomes()
        self._wait_for_rank_0(
            lambda: self._ballots.announced() >= (question.number, question.looks),
            question.timeout,
            "to look too",
            None,
        )
        verdict = self._ballots.read(question.tag)
        return verdict if verdict is not None and verdict.at <= question.looks else None

    def _judge(self, tag: str, timeout: float, outcome: Future[Any] | None) -> Verdict:
        """Rank 0's verdict; whoever is silent for too long has failed."""
        found: list[Verdict] = []

        def ready() -> bool:
            self._say_outcomes()
            verdict = self._ballots.counted(tag)
            if verdict is not None:
                found.append(verdict)
            return verdict is not None

        if not _wait(ready, time.monotonic() + timeout, outcome):
            silent = self._ballots.silent(tag)
            return self._ballots.failed(tag, silent, dict.fromkeys(silent, f"said nothing for {timeout:g} s"))
        if found[0].failures:
            time.sleep(_COMPANY_SECONDS)
            found.append(self._ballots.counted(tag) or found[0])
            return Verdict({**found[0].failures, **found[1].failures}, found[1].errno)
        return found[0]

    def _learn(self, tag: str, timeout: float, outcome: Future[Any] | None) -> Verdict:
        """Rank 0's verdict, once it is there."""
        found: list[Verdict] = []

        def ready() -> bool:
            self._say_outcomes()
            verdict = self._ballots.read(tag)
            if verdict is not None:
                found.append(verdict)
            return verdict is not None

        self._wait_for_rank_0(ready, timeout, "to decide", outcome)
        return found[0]

    def _wait_for_rank_0(
        self, ready: Callable[[], bool], timeout: float, what: str, outcome: Future[Any] | None
    ) -> None:
        def ready_or_lost() -> bool:
            if ready():
                return True
            lost = self._life.lost(lambda: [0])
            if lost:
                raise RanksError(f"Rank 0 {lost[0]}.", None, lost)
            return False

        if not _wait(ready_or_lost, time.monotonic() + timeout + _GRACE_SECONDS, outcome):
            raise CheckpointTimeoutError(f"Waited {timeout + _GRACE_SECONDS:g} s in vain for rank 0 {what}.")

    def _say_outcomes(self) -> None:
        """Tell how those calls went here that are over."""
        for question in self._open:
            if question.outcome.done():
                self._say(question, question.outcome.exception(0))

    def _say(self, question: Question, error: BaseException | None) -> None:
        if not question.said:
            question.said = True
            self._ballots.tell(question.tag, error)

    def _close(self, question: Question) -> None:
        self._open.remove(question)
        self._decided.pop(question.number, None)


def _wait(ready: Callable[[], bool], deadline: float, outcome: Future[Any] | None) -> bool:
    """Whether `ready()` said so before the deadline (monotonic seconds); asked again once the outcome is there."""
    pause = _FIRST_POLL
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if outcome is None or outcome.done():
            time.sleep(min(pause, left))
        else:
            wait([outcome], min(pause, left))
        pause = min(pause * 1.5, _LONGEST_POLL)
    return True
