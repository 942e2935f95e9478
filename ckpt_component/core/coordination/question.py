"""One question to all ranks: what each rank posts, and what the leader answers."""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...errors import CheckpointTimeoutError, RanksError, kind_and_text, name_ranks, ranks_failed
from .coordinator import Coordinator
from .heartbeat import FailureDetector, Place, place_of
from .rank_store import RankStore

#: Seconds after the first failure in which other ranks that fail are still named in the error.
_COMPANY_SECONDS = 0.2


class Question:
    """A question, kept in the keys `<tag>/...` of the shared store.

    Args:
        store: this thread's connection
        tag: names the question
    """

    def __init__(self, store: RankStore, tag: str) -> None:
        self.store = store
        self.tag = tag

    def count(self, counter: str, amount: int = 0) -> int:
        """Add to one of the question's counters, and return its new value."""
        # Of failures it only matters whether there is one.
        return self.store.add(f"{self.tag}/{counter}", amount, repeatable=counter == "failed")

    def close(self) -> int:
        """Close the question; returns how often it was closed. Above 1, it may have been this rank."""
        try:
            return self.count("closed", 1)
        except RanksError:
            if self.store.is_blocked:
                raise
            return self.count("closed", 1)  # it is unknown whether the first one was done

    def post(self, value: Any) -> None:
        """Post this rank's value."""
        self.store.set(f"{self.tag}/posts/{self.store.rank}", pack(value))
        self.count("count", 1)

    def has_posted(self, rank: int) -> bool:
        """Whether a rank has posted."""
        return self.store.has(f"{self.tag}/posts/{rank}")

    def has_all(self) -> bool:
        """Whether every rank has posted."""
        return self.count("count") >= self.store.world_size

    def missing(self) -> list[int]:
        """The ranks that have not posted."""
        return [rank for rank in range(self.store.world_size) if not self.has_posted(rank)]

    def late(self) -> list[int]:
        """The ranks that have not posted. If there are none, the counter is made right: one died before it counted."""
        ranks = self.missing()
        if not ranks:
            self.count("count", self.store.world_size)
        return ranks

    def absentees(self) -> str:
        """Describe what the question waits for, for a message."""
        ranks = self.missing()
        return (
            f"{name_ranks(ranks).lower()} to take part in '{self.tag}'" if ranks else f"rank 0 to decide '{self.tag}'"
        )

    def values(self, ranks: Iterable[int]) -> list[Any]:
        """Return what these ranks have posted."""
        return [unpack(data) for data in self.store.read([f"{self.tag}/posts/{rank}" for rank in ranks])]

    def answer(self, **fields: Any) -> None:
        """Post the answer for all ranks."""
        self.store.set(f"{self.tag}/answer", pack(fields))

    def give_part(self, rank: int, part: Any) -> None:
        """Post one rank's part of the answer."""
        self.store.set(f"{self.tag}/part/{rank}", pack(part))

    def take_part(self) -> Any:
        """Read and remove this rank's part of the answer."""
        key = f"{self.tag}/part/{self.store.rank}"
        (data,) = self.store.read([key])
        self.store.delete([key])
        return unpack(data)

    def leave(self, *, answered: bool) -> None:
        """This rank has no more use for the question.

        Args:
            answered: nothing that was posted is needed any more; each rank removes its own, since rank 0 would take
                long to do so for all
        """
        if answered:
            self.store.delete([f"{self.tag}/posts/{self.store.rank}"])
        self.count("left", 1)

    def delete(self, ranks: Iterable[int]) -> None:
        """Remove all keys of the question; of what was posted, that of these ranks."""
        names = [f"posts/{rank}" for rank in ranks]
        self.store.delete([f"{self.tag}/{name}" for name in (*names, "count", "failed", "closed", "answer", "left")])

    def is_over(self, detector: FailureDetector, lost: dict[int, str]) -> bool:
        """Whether every rank has voted, or one has failed or is lost; adds lost ranks to `lost`."""
        if self.has_all() or self.count("failed"):
            return True
        lost.update(detector.dead_ranks(self.late))
        return bool(lost)

    def outcomes(self, detector: FailureDetector, deadline: float) -> list[Any]:
        """On the leader: wait for all ranks, and return what each rank's work returned, by rank.

        Raises:
            RanksError: a rank failed, died or hangs, or did not finish in time
        """
        lost: dict[int, str] = {}
        try:
            self.store.wait_until(lambda: self.is_over(detector, lost), deadline, lambda: "all ranks to write")
        except CheckpointTimeoutError as error:
            late = dict.fromkeys(self.missing(), "did not finish before timeouts.write was over")
            if late:  # else the last vote came just now
                raise ranks_failed(late, causes=dict.fromkeys(late, CheckpointTimeoutError.__name__)) from error
        if self.count("failed"):
            self.store.outside.sleep(_COMPANY_SECONDS)
        silent = set() if self.has_all() else set(self.missing())
        present = [rank for rank in range(self.store.world_size) if rank not in silent]
        votes = dict(zip(present, self.values(present), strict=True))
        failures = {rank: vote["error"] for rank, vote in votes.items() if "error" in vote}
        if failures or lost:
            errno = next((plain["errno"] for plain in failures.values() if plain["errno"] is not None), None)
            told = {rank: kind_and_text(plain) for rank, plain in failures.items()}
            causes = {rank: kind for rank, (kind, _) in told.items()} | detector.causes(lost)
            raise ranks_failed({rank: text for rank, (_, text) in told.items()} | lost, errno, causes)
        return [vote["work"] for vote in votes.values()]


def pack(value: Any) -> bytes:
    """Encode a plain value for the store."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return json.loads(zlib.decompress(data))


#: How many questions are kept for ranks that have not read the answer.
_KEPT = 64


class AnsweredQuestions:
    """Removes old questions from the store when a new one is added. Used by several threads.

    Args:
        lock: held while questions are removed
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._tags: deque[str] = deque()
        self._lock = lock

    def add(self, question: Question) -> None:
        """Add a question, and remove those that every rank has read, or that are so old that a rank must be dead."""
        readers = question.store.world_size - 1
        with self._lock:
            old = [*self._tags]
            self._tags.append(question.tag)
            for number, tag in enumerate(old):
                earlier = Question(question.store, tag)
                all_left = earlier.count("left") >= readers
                if all_left or len(old) - number > _KEPT:
                    # A rank that left before the answer was there has left its failure for rank 0 to read.
                    own = all_left and not earlier.count("failed")
                    earlier.delete([0] if own else range(question.store.world_size))
                    self._tags.remove(tag)


logger = logging.getLogger("ckpt_component.coordination")

#: In seconds: how often a waiting rank checks where the missing ranks are, and when it warns, once.
_LOOK_SECONDS, _WARN_SECONDS = 1.0, 10.0
#: How many of the missing ranks are checked, and how many a message names.
_ASKED, _NAMED = 256, 8


class StepQuestions:
    """Questions that only rank 0 answers, one per call of a method that takes a step.

    Args:
        ranks: the ranks that must call
        name: the method's name
    """

    def __init__(self, ranks: Coordinator, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self.restart(0)

    def restart(self, turn: int) -> None:
        """Restart from an earlier step, on all ranks; `turn` distinguishes the new questions from earlier ones."""
        self._tag = f"{self._name}/{turn}"
        self._number = 0
        self._ahead: list[Any] | None = None  # rank 0's answer for a step that this rank has not reached

    def ask(self, step: int, action: Callable[[], Any], deadline: float) -> Any:
        """Like `Coordinator.run_on_leader`, for this step. Skips answers for steps that only rank 0 called for.

        Raises:
            RanksError: rank 0 did not call for this step
        """
        while True:
            if self._ahead is None:
                tag = f"{self._tag}/{self._number + 1}"
                self._ahead = self._ranks.run_on_leader(tag, lambda: [step, action()], deadline, self._name)
                self._number += 1
            reached, answer = self._ahead
            if reached > step:
                raise RanksError(
                    f"{self._name} must be called on every rank; rank 0 did not for step {step}: "
                    f"it is at step {reached}."
                )
            self._ahead = None
            if reached == step:
                return answer


class Lookout:
    """Checks, for a rank that waits in a call, where the ranks are that have not called.

    Args:
        store: connection of the waiting rank
        name: the method that was called
        place: where this rank is
        missing: returns the ranks that have not called
        waits_for: returns those of them that this rank waits for
    """

    def __init__(
        self,
        store: RankStore,
        name: str,
        place: Place,
        missing: Callable[[], list[int]],
        waits_for: Callable[[], list[int]],
    ) -> None:
        self._store = store
        self._outside = store.outside
        self._name = name
        self._place = place
        self._missing = missing
        self._waits_for = waits_for
        self._began = self._outside.now()
        self._next = self._began + _LOOK_SECONDS
        self._warned = False

    def look(self) -> None:
        """Check, at most once a second; warn once, after ten seconds.

        Raises:
            RanksError: a rank has continued and will not make the call
        """
        now = self._outside.now()
        if now < self._next:
            return
        places = self._places(self._waits_for())
        self._next = self._outside.now() + _LOOK_SECONDS
        past = {rank: str(place) for rank, place in places.items() if place is not None and place.is_past(self._place)}
        if past:
            raise RanksError(f"{self._text()}.", None, past)
        if places and not self._warned and now - self._began >= _WARN_SECONDS:
            self._warned = True
            logger.warning("waiting for %.0f s: %s", now - self._began, self._text())

    def explain(self, error: CheckpointTimeoutError) -> CheckpointTimeoutError:
        """Return the error of the wait, which names the ranks that did not call."""
        return CheckpointTimeoutError(f"Timed out: {self._text()}.") if self._missing() else error

    def _places(self, ranks: list[int]) -> Mapping[int, Place | None]:
        return {rank: place_of(self._store, rank) for rank in ranks[:_ASKED]}

    def _text(self) -> str:
        missing = self._missing()
        first = missing[:_NAMED]
        one = len(missing) == 1
        more = f" (and {len(missing) - _NAMED} more)" if len(missing) > _NAMED else ""
        ranks = ("rank " if one else "ranks ") + ", ".join(map(str, first)) + more
        step = "" if self._place.step is None else f" for step {self._place.step}"
        where = [
            f"{'it' if one else f'rank {rank}'} {self._where(place)}" for rank, place in self._places(first).items()
        ]
        return f"{self._name} must be called on every rank; {ranks} did not{step}: {', '.join(where)}"

    def _where(self, place: Place | None) -> str:
        if place is None:
            return "has sent no heartbeat"
        return f"{place} too, and late" if place == self._place and place.step is not None else str(place)
