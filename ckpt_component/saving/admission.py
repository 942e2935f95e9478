"""The beginning of a save: all ranks agree that it takes place, before anything is copied.

It is the one moment at which training waits for other ranks: each says where it wants to save, whether its state has
changed its structure, and what went wrong; rank 0 looks whether the path is free and gives the attempt its token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..coordination import Coordinator, Meetings
from ..errors import CheckpointSaveError, CheckpointStallError, RanksError
from ..storage.commit import refuse_existing
from ..storage.names import new_token


@dataclass(frozen=True)
class Proposal:
    """What one rank says about the next save.

    Attributes:
        path: where to, absolute.
        changed: its state has to be planned anew.
        error: why it cannot take part.
        untold: earlier saves whose failure its caller has not been told, by number.
        busy: it would have to wait for an earlier save, and must not (`overlap`).
        stalled: what it waited for in vain, as long as training may wait.
    """

    path: str
    changed: bool = False
    error: Exception | None = None
    untold: Mapping[int, str] = field(default_factory=dict)
    busy: bool = False
    stalled: str | None = None

    def as_message(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "path": self.path,
            "changed": self.changed,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "untold": {str(number): text for number, text in self.untold.items()},
            "busy": self.busy,
            "stalled": self.stalled,
        }


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on.

    Attributes:
        token: names the attempt.
        replan: a rank's state has another structure than before.
        untold: instead of all that: the number of an earlier save that failed, and why. All ranks raise that first.
        busy: instead of all that: a rank would have to wait for an earlier save.
    """

    token: str = ""
    replan: bool = False
    untold: tuple[int, str] | None = None
    busy: bool = False


class Schedule:
    """Numbers the saves of a checkpointer.

    Args:
        ranks: who has to agree.
        bounded: training must not wait beyond the deadline, not even for storage that hangs.
        by_rename: how saves are committed, and so what stands in the way of one (`refuse_existing`).

    Attributes:
        admit: called on the leading rank with the path of every save, in place of `refuse_existing`.
    """

    def __init__(self, ranks: Coordinator, *, bounded: bool, by_rename: bool) -> None:
        self._ranks = ranks
        self._bounded = bounded
        self._by_rename = by_rename
        self._meetings = Meetings(ranks, "save")
        self.admit: Callable[[str], None] | None = None

    @property
    def number(self) -> int:
        """Of the last save that was proposed, from 1; alike on all ranks."""
        return self._meetings.number

    def agree(self, mine: Proposal, deadline: float) -> Agreement:
        """Agree on the next save.

        Args:
            mine: what this rank says.
            deadline: monotonic seconds; what is not agreed then does not take place, on any rank.

        Raises:
            CheckpointExistsError: the path is taken.
            RanksError: a rank cannot take part, or has gone on without this save; with one rank its own error instead.
            CheckpointStallError: a rank waited in vain for what it needs.
            CheckpointTimeoutError: a rank did not come.
        """
        if mine.error is not None and self._ranks.world_size == 1:
            self._meetings.number += 1
            raise mine.error
        look_until = deadline if self._bounded else None
        try:
            agreed = self._meetings.ask(
                mine.as_message(), lambda said: _decide(said, self._refuse_taken, look_until), deadline, mine.path
            )
        except RanksError as failure:
            raise failure from mine.error
        told = agreed["untold"]
        return Agreement(
            agreed["token"], agreed["replan"], None if told is None else (told[0], told[1]), agreed["busy"]
        )

    def _refuse_taken(self, path: str) -> None:
        if self.admit is None:
            refuse_existing(path, by_rename=self._by_rename)
        else:
            self.admit(path)


def _decide(
    said: list[dict[str, Any]], refuse_taken: Callable[[str], None], look_until: float | None
) -> dict[str, Any]:
    """On the leading rank: what becomes of a save, from what every rank says."""
    errors = {rank: each["error"] for rank, each in enumerate(said) if each["error"] is not None}
    if errors:
        named = " | ".join(f"rank {rank}: {text}" for rank, text in list(errors.items())[:8])
        raise RanksError(f"Nothing was saved, because {len(errors)} of {len(said)} ranks failed. {named}", None, errors)
    paths = sorted({each["path"] for each in said})
    if len(paths) > 1:
        where = [next(rank for rank, each in enumerate(said) if each["path"] == path) for path in paths[:2]]
        raise CheckpointSaveError(
            f"The ranks must save to one path, and rank {where[0]} named {paths[0]}, rank {where[1]} {paths[1]}. save "
            "must be called on every rank for the same step."
        )
    answer: dict[str, Any] = {"token": "", "replan": False, "untold": None, "busy": False}
    untold = {int(number): text for each in said for number, text in each["untold"].items()}
    if untold:
        first = min(untold)
        return {**answer, "untold": [first, untold[first]]}
    if any(each["busy"] for each in said):
        return {**answer, "busy": True}
    stalled = {rank: each["stalled"] for rank, each in enumerate(said) if each["stalled"] is not None}
    if stalled:
        rank, text = next(iter(stalled.items()))
        who = "Training" if len(said) == 1 else f"Rank {rank}"
        raise CheckpointStallError(f"{paths[0]} is not saved: {who} waited in vain for {text}.")
    if look_until is None:
        refuse_taken(paths[0])
    else:
        _refuse_taken_until(refuse_taken, paths[0], look_until)
    return {**answer, "token": new_token(), "replan": any(each["changed"] for each in said)}


def _refuse_taken_until(refuse_taken: Callable[[str], None], path: str, deadline: float) -> None:
    """`refuse_taken` on a thread that is left behind when the storage does not answer."""
    failures: list[Exception] = []

    def look() -> None:
        try:
            refuse_taken(path)
        except Exception as error:
            failures.append(error)

    looking = threading.Thread(target=look, name="ckpt-look", daemon=True)
    looking.start()
    looking.join(max(deadline - time.monotonic(), 0))
    if looking.is_alive():
        raise CheckpointStallError(f"{path} is not saved: its storage did not answer whether the path is free.")
    if failures:
        raise failures[0]
