"""The beginning of a save: all ranks agree that it takes place, before anything is copied.

It is the one moment at which training waits for other ranks: each says where it wants to save, whether its state has
changed its structure, and what went wrong; rank 0 checks that the path is free and gives the attempt its token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypedDict, cast

from ..coordination import Coordinator
from ..errors import (
    CheckpointSaveError,
    CheckpointStallError,
    CheckpointTimeoutError,
    RanksError,
    describe_error,
    ranks_failed,
)
from ..storage.names import new_token
from .transaction import PendingSave


class SaveProposal(TypedDict, total=False):
    """What one rank says about the next save, as JSON values.

    Attributes:
        path: where to, absolute.
        changed: its state has to be planned anew.
        error: why it cannot take part.
        cause: the error's type.
        failed: earlier saves whose error its caller has not seen, as numbers and texts.
        busy: it would have to wait for an earlier save, and must not (`overlap`).
        stalled: what it has waited for, as long as training may wait.
    """

    path: str
    changed: bool
    error: str
    cause: str
    failed: list[tuple[int, str]]
    busy: bool
    stalled: str


class SaveDecision(TypedDict, total=False):
    """What the ranks agreed on, as JSON values.

    Attributes:
        token: names the attempt.
        replan: a rank's state has another structure than before.
        failed: instead of a token: the number of an earlier save that failed, and why. All ranks raise that first.
    """

    token: str
    replan: bool
    failed: tuple[int, str]


class SaveAdmission:
    """Numbers the saves of a checkpointer, and lets the ranks agree on each.

    Args:
        ranks: who has to agree.
        check_path: called on the leading rank with the path of every save; what it raises stops the save.
        max_stall: seconds that a save may keep training waiting, even where storage hangs; None: no limit.
    """

    def __init__(self, ranks: Coordinator, check_path: Callable[[str], None], max_stall: float | None) -> None:
        self._ranks = ranks
        self._check_path = check_path
        self._max_stall = max_stall

    def decide(self, save: PendingSave, proposal: SaveProposal, deadline: float) -> SaveDecision:
        """Agree on the next save, which gets its number; an empty decision says that a rank is busy.

        Args:
            save: with its error, if this rank cannot take part.
            proposal: what else this rank says.
            deadline: monotonic seconds; what is not agreed then does not take place, on any rank.

        Raises:
            CheckpointExistsError: the path is taken.
            RanksError: a rank cannot take part, or has gone on without this save; with one rank its own error instead.
            CheckpointStallError: a rank waited too long for what it needs.
            CheckpointTimeoutError: a rank did not come.
        """
        error, proposal["path"] = save.error, save.path
        if error is not None:
            proposal["error"], proposal["cause"] = describe_error(error), type(error).__name__
            if self._ranks.world_size == 1:
                raise error
        try:
            decision = self._ranks.meet("save", proposal, partial(self._decide, deadline), deadline, save.path)
        except RanksError as failure:
            raise failure from error
        except CheckpointTimeoutError as late:
            if self._max_stall is None or isinstance(late, CheckpointStallError):
                raise
            if "stalled" in proposal:  # its time was up before the ranks could agree that it was
                raise CheckpointStallError(_no_memory(save.path, proposal["stalled"])) from late
            limit = f"Training waits {self._max_stall:g} s at most (checkpoint.max_stall_s)."
            raise CheckpointStallError(f"{save.path} was not saved: {late} {limit}") from late
        finally:
            save.number = self._ranks.meetings["save"]
        return cast(SaveDecision, decision)

    def _decide(self, deadline: float, proposals: list[SaveProposal]) -> SaveDecision:
        """On the leading rank: what becomes of a save, from what every rank proposes."""
        failures, causes, stalled = dict[int, str](), dict[int, str](), dict[int, str]()
        paths, earlier = dict[str, int](), dict[int, str]()
        replan = busy = False
        for rank, proposal in enumerate(proposals):
            paths.setdefault(proposal["path"], rank)
            replan = replan or proposal.get("changed", False)
            busy = busy or proposal.get("busy", False)
            earlier.update(proposal.get("failed", ()))
            if "error" in proposal:
                failures[rank], causes[rank] = proposal["error"], proposal["cause"]
            if "stalled" in proposal:
                stalled[rank] = proposal["stalled"]
        if failures:
            raise ranks_failed(failures, causes=causes)
        if len(paths) > 1:
            (first, rank), (other, other_rank) = sorted(paths.items())[:2]
            raise CheckpointSaveError(
                f"The ranks must save to one path, and rank {rank} named {first}, rank {other_rank} {other}. save "
                "must be called on every rank for the same step."
            )
        path = next(iter(paths))
        if earlier:
            number = min(earlier)
            return {"failed": (number, earlier[number])}
        if busy:
            return {}
        if stalled:
            rank, text = next(iter(stalled.items()))
            on = "" if len(proposals) == 1 else f" on rank {rank}"
            raise CheckpointStallError(_no_memory(path, text, on))
        if self._max_stall is None:
            self._check_path(path)
        else:
            self._check_path_until(path, deadline)
        return {"token": new_token(), "replan": replan}

    def _check_path_until(self, path: str, deadline: float) -> None:
        """`check_path` on a thread that is left behind when the storage does not answer."""
        failures: list[Exception] = []

        def check() -> None:
            try:
                self._check_path(path)
            except Exception as error:
                failures.append(error)

        checking = threading.Thread(target=check, name="ckpt-look", daemon=True)
        checking.start()
        checking.join(max(deadline - time.monotonic(), 0))
        if checking.is_alive():
            raise CheckpointStallError(f"{path} was not saved: its storage did not answer whether the path is free.")
        if failures:
            raise failures[0]


def _no_memory(path: str, limit: str, where: str = "") -> str:
    return f"{path} was not saved: no staging memory became free{where} within {limit}"
