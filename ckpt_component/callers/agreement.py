"""How callers on all ranks agree: small messages in the job's own store, no collective, nothing on a device.

Every question is about one call, whose number is the same on all ranks. Every rank says once how the call went there;
rank 0 decides when all have, or when the first one failed; every rank learns the decision; the last one to do so
removes the question's keys. What a look without waiting may tell has to be the same on all ranks, so rank 0 says
with each look what the next look will tell, and how far these announcements go.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from ..coordination.heartbeat import Heartbeat, Watch
from ..coordination.rank_store import RankStore
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError, RanksError
from ..process.remote_error import describe_failure

logger = logging.getLogger(__name__)

#: Without a sign of life for so long, a rank is gone.
_HEARTBEAT_SECONDS = 30.0
#: In place of a sign of life: none is to be expected.
_RESTING = b"[0, 0]"
#: Others wait so much longer for rank 0's decision than rank 0 waits for them.
_GRACE_SECONDS = 15.0
#: After the first rank failed, others that fail in the same moment get this long to be named too.
_COMPANY_SECONDS = 0.2
#: For a question that has no time of its own; `torch.distributed` gives a collective as long.
_SECONDS = 1800.0
#: A wait looks this often at first, and ever more seldom, so that 1,000 ranks do not keep the store busy.
_FIRST_POLL, _LONGEST_POLL = 0.001, 0.2
#: How many ranks an error names one by one.
_NAMED = 8


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


@dataclass(frozen=True)
class Verdict:
    """What rank 0 decided: which ranks failed, if any, and in which look at the question that is told first."""

    failures: dict[int, str]
    errno: int | None = None
    at: int = 0

    def to_raise(self, what: str, world_size: int, cause: BaseException | None) -> RanksError | None:
        """The error that is the same on all ranks, with this rank's own as its cause; None where all went well."""
        if not self.failures:
            return None
        failed = sorted(self.failures)
        names = ", ".join(map(str, failed[:_NAMED])) + (", ..." if len(failed) > _NAMED else "")
        texts = " | ".join(f"rank {number}: {self.failures[number]}" for number in failed[:_NAMED])
        code = "" if self.errno is None else f" ({errno.errorcode.get(self.errno, f'errno {self.errno}')})"
        plural = "s" if len(failed) > 1 else ""
        text = f"{what} failed on rank{plural} {names} of {world_size}{code}. {texts}"
        error = RanksError(text, self.errno, dict(self.failures))
        error.__cause__ = cause
        return error


class Agreement:
    """What one caller or queue agrees on with those of the other ranks. Used by one thread.

    Args:
        store: a connection of its own.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._beats = store.clone()
        self._hearts: list[Heartbeat] = []
        self._watch: Watch | None = None
        self._count = 0
        self._sums = 0
        self._open: deque[Question] = deque()
        self._decided: dict[int, Verdict] = {}  # on rank 0
        weakref.finalize(self, _stop, self._hearts, os.getpid())

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self._store.world_size

    def rest(self) -> None:
        """Give no more signs of life, until the next question. Call this on all ranks when nothing is open."""
        if not self._hearts:
            return
        self._watch = None
        _stop(self._hearts, os.getpid())
        try:
            # Not removed: a store that is asked for a key that vanishes at this moment waits for it.
            self._store.set(f"beat/{self._store.rank}", _RESTING)
        except CheckpointError as error:
            logger.debug("%s", error)

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
        self._live()
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
        self._live()
        try:
            verdict = self._lead(question, blocking) if self._leads else self._follow(question, blocking)
            if verdict is not None:
                self._leave(question.tag, verdict)
        except CheckpointError:
            self._close(question)
            raise
        question.looks += 1
        if verdict is not None:
            self._close(question)
        return verdict

    def withdraw(self, question: Question, failure: CheckpointSaveError | None) -> None:
        """Close a question without its verdict. Never raises.

        Args:
            question: open.
            failure: what other ranks are told in case they still ask. None: how the call went here, if that is known.
        """
        try:
            if failure is not None:
                self._say(question, failure)
                if self._leads and question.number not in self._decided:
                    # Those who are behind are told in their earlier looks what was told here.
                    self._decide(question.tag, Verdict({0: str(failure)}, failure.errno, question.looks))
                    self._announce(question.number + 1, 0)
            elif question.outcome.done():
                self._say(question, question.outcome.exception(0))
            self._leave(question.tag, None)
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
        self._live()
        self._tell(step, error)
        if self._leads:
            verdict = self._judge(step, timeout, None)
            self._decide(step, verdict)
        else:
            verdict = self._learn(step, timeout, None)
        self._leave(step, verdict)
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
        self._live()
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
        self._store.add(f"{tag}/sum", value)
        self._store.add(f"{tag}/count", 1)
        if not _wait(lambda: self._all_said(tag), time.monotonic() + _SECONDS, None):
            raise CheckpointTimeoutError(f"Not all {self.world_size} ranks took part within {_SECONDS:g} s.")
        total = self._store.add(f"{tag}/sum", 0)
        self._leave(tag, Verdict({}))
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
            self._decide(question.tag, verdict)
        self._say_outcomes()
        for later in self._open:
            if later.number in self._decided:
                continue
            found = self._counted(later.tag)
            if found is None:
                break
            found = replace(found, at=question.looks + 1 if later is question else 0)
            self._decided[later.number] = found
            self._decide(later.tag, found)
        self._announce(*((question.number, question.looks + 1) if verdict is None else (question.number + 1, 0)))
        return verdict

    def _follow(self, question: Question, blocking: bool) -> Verdict | None:
        """Another rank's look: what rank 0 has announced for it."""
        if blocking:
            return self._learn(question.tag, question.timeout, question.outcome)
        self._say_outcomes()
        self._wait_for_rank_0(
            lambda: self._announced() >= (question.number, question.looks), question.timeout, "to look too", None
        )
        verdict = self._read(question.tag)
        return verdict if verdict is not None and verdict.at <= question.looks else None

    def _judge(self, tag: str, timeout: float, outcome: Future[Any] | None) -> Verdict:
        """Rank 0's verdict; whoever is silent for too long has failed."""
        found: list[Verdict] = []

        def ready() -> bool:
            self._say_outcomes()
            verdict = self._counted(tag)
            if verdict is not None:
                found.append(verdict)
            return verdict is not None

        if not _wait(ready, time.monotonic() + timeout, outcome):
            silent = self._silent(tag)
            return self._failed(tag, silent, dict.fromkeys(silent, f"said nothing for {timeout:g} s"))
        if found[0].failures:
            time.sleep(_COMPANY_SECONDS)
            found.append(self._counted(tag) or found[0])
            return Verdict({**found[0].failures, **found[1].failures}, found[1].errno)
        return found[0]

    def _learn(self, tag: str, timeout: float, outcome: Future[Any] | None) -> Verdict:
        """Rank 0's verdict, once it is there."""
        found: list[Verdict] = []

        def ready() -> bool:
            self._say_outcomes()
            verdict = self._read(tag)
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
            lost = self._lost(lambda: [0])
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
            self._tell(question.tag, error)

    def _tell(self, tag: str, error: BaseException | None) -> None:
        self._store.set(f"{tag}/said/{self._store.rank}", json.dumps(_as_plain(error)).encode())
        if error is not None:
            self._store.add(f"{tag}/failed", 1)
        self._store.add(f"{tag}/count", 1)

    def _counted(self, tag: str) -> Verdict | None:
        """What follows from what the ranks have said until now; None: nothing yet."""
        all_said = self._all_said(tag)
        failed = self._store.add(f"{tag}/failed", 0)  # after the above: who failed says this first
        if all_said and not failed:
            return Verdict({})
        lost = {} if failed else self._lost(lambda: self._silent(tag))
        if not failed and not lost:
            return None
        return self._failed(tag, self._silent(tag), lost)

    def _failed(self, tag: str, silent: list[int], lost: dict[int, str]) -> Verdict:
        """The verdict with the errors that were said, and what is known of ranks that are lost."""
        present = [number for number in range(self.world_size) if number not in silent]
        said = self._store.read([f"{tag}/said/{number}" for number in present])
        told = {number: json.loads(data) for number, data in zip(present, said, strict=True)}
        failures = {number: plain for number, plain in told.items() if plain is not None}
        code = next((plain["errno"] for plain in failures.values() if plain["errno"] is not None), None)
        return Verdict({**{number: plain["text"] for number, plain in failures.items()}, **lost}, code)

    def _all_said(self, tag: str) -> bool:
        return self._store.add(f"{tag}/count", 0) >= self.world_size

    def _silent(self, tag: str) -> list[int]:
        return [number for number in range(self.world_size) if self._store.peek(f"{tag}/said/{number}") is None]

    def _lost(self, missing: Callable[[], list[int]]) -> dict[int, str]:
        """Which of the missing ranks are gone, and what is to say about them. One that has yet to begin is late."""

        def lived() -> list[int]:
            return [number for number in missing() if self._store.peek(f"beat/{number}") not in (None, _RESTING)]

        return {} if self._watch is None else self._watch.lost(lived)

    def _decide(self, tag: str, verdict: Verdict) -> None:
        failures = {str(number): text for number, text in verdict.failures.items()}
        plain = {"failures": failures, "errno": verdict.errno, "at": verdict.at}
        self._store.set(f"{tag}/verdict", json.dumps(plain).encode())

    def _read(self, tag: str) -> Verdict | None:
        data = self._store.peek(f"{tag}/verdict")
        if data is None:
            return None
        plain = json.loads(data)
        failures = {int(number): text for number, text in plain["failures"].items()}
        return Verdict(failures, plain["errno"], plain["at"])

    def _announce(self, number: int, looks: int) -> None:
        """Say up to which look all that there is to tell has been written."""
        self._store.set("announced", f"{number} {looks}".encode())

    def _announced(self) -> tuple[int, int]:
        number, looks = (self._store.peek("announced") or b"0 0").split()
        return int(number), int(looks)

    def _leave(self, tag: str, verdict: Verdict | None) -> None:
        """Nothing more is asked about it here; the last rank to say so removes its keys."""
        well = verdict is not None and not verdict.failures
        if well:
            self._store.delete([f"{tag}/said/{self._store.rank}"])
        if self._store.add(f"{tag}/left", 1) >= self.world_size:
            said = [] if well else [f"said/{number}" for number in range(self.world_size)]
            self._store.delete([f"{tag}/{name}" for name in (*said, "count", "failed", "verdict", "sum", "left")])

    def _close(self, question: Question) -> None:
        self._open.remove(question)
        self._decided.pop(question.number, None)

    def _live(self) -> None:
        """Give signs of life from now on: others may wait for this rank, however long it is busy."""
        if not self._hearts:
            others = range(1, self.world_size) if self._leads else [0]
            self._watch = Watch(self._store, others, _HEARTBEAT_SECONDS, None)
            heart = Heartbeat(self._beats, lambda: 0, _HEARTBEAT_SECONDS)
            self._hearts.append(heart)
            heart.__enter__()


def _stop(hearts: list[Heartbeat], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy, without the thread
    while hearts:
        with contextlib.suppress(RuntimeError):  # collected in the heart's own thread, which cannot join itself
            hearts.pop().__exit__(None, None, None)


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


def _as_plain(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    plain = describe_failure(error)
    text = str(error) if isinstance(error, CheckpointError) else plain["error"]
    code = error.errno if isinstance(error, CheckpointSaveError) else plain["errno"]
    return {"text": text, "errno": code}
