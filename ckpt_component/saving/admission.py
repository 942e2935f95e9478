"""The beginning of a save: all ranks agree that it takes place, before anything is copied.

It is the one moment at which training waits for other ranks: each says where it wants to save, whether its state has
changed its structure, and what went wrong; rank 0 checks that the path is free and gives the attempt its token.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

from ..coordination import Coordinator
from ..errors import (
    CheckpointBusyError,
    CheckpointSaveError,
    CheckpointStallError,
    CheckpointTimeoutError,
    RanksError,
    describe_error,
    ranks_failed,
)
from ..options import ResolvedTimeouts
from ..stagers.base import Stager, StatePlan
from ..storage.names import new_token
from .in_flight import InFlightSaves, PendingSave

#: The failure of an earlier save that one rank knows reaches the others within this time.
_DECISION_SECONDS = 60.0


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


class SaveAdmission:
    """Numbers the saves of a checkpointer, and lets the ranks agree on each.

    Args:
        ranks: who has to agree.
        stager: inspects the state, and knows whether an earlier save still holds its memory.
        saves: the earlier saves.
        check_path: called on the leading rank with the path of every save; what it raises stops the save.
        timeouts: for how long a save may keep training waiting.
    """

    def __init__(
        self,
        ranks: Coordinator,
        stager: Stager,
        saves: InFlightSaves,
        check_path: Callable[[str], None],
        timeouts: ResolvedTimeouts,
    ) -> None:
        self._ranks = ranks
        self._stager = stager
        self._saves = saves
        self._check_path = check_path
        self._max_stall = timeouts.max_stall
        self._waiting = timeouts.waiting

    def admit(
        self, save: PendingSave, state_dict: Mapping[Any, Any], may_wait: bool = True
    ) -> StatePlan | BaseException:
        """Agree on the next save, which gets its number, and its token if it takes place.

        Args:
            save: with its path.
            state_dict: to be saved.
            may_wait: False: for this rank the save must not wait for an earlier one.

        Returns:
            What to copy. Or, of a save that has not failed and does not take place either, what to raise instead: the
            error of an earlier save, or CheckpointBusyError.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointExistsError: the path is taken.
            RanksError: a rank cannot take part, or has gone on without this save; with one rank its own error instead.
            CheckpointStallError: a rank waited too long for what it needs.
            CheckpointTimeoutError: a rank did not come.
        """
        # The call waits for nothing beyond this deadline; what is not agreed then does not take place, on any rank.
        deadline = time.monotonic() + self._waiting
        proposal: SaveProposal = {"path": save.path, "failed": self._saves.drop_ended()}
        plan, failure = None, None
        if not may_wait and self._stager.busy:
            proposal["busy"] = True
        else:
            try:
                plan = self._stager.inspect(state_dict)
                proposal["changed"] = plan.changed
            except Exception as error:
                if self._ranks.world_size == 1:
                    raise
                failure = error  # the other ranks wait for this one, so they learn of it first
                proposal["error"], proposal["cause"] = describe_error(error), type(error).__name__
        # With max_stall_s the ranks wait before they agree, so that they give a save up together.
        if plan is not None and self._max_stall is not None and not self._stager.wait_free(deadline):
            names = " and ".join(each.path for each in self._saves if not each.done()) or "an earlier save"
            proposal["stalled"] = (
                f"no staging memory became free within {self._waiting:g} s (checkpoint.max_stall_s) because {names} is "
                "still being written. Save less often, or raise checkpoint.stager.arenas."
            )
        try:
            decision = self._ranks.meet("save", proposal, partial(self._decide, deadline), deadline, save.path)
        except RanksError as error:
            raise error from failure
        except CheckpointTimeoutError as late:
            if self._max_stall is None or isinstance(late, CheckpointStallError):
                raise
            why = f"{late} Training waits {self._max_stall:g} s at most (checkpoint.max_stall_s)."
            if "stalled" in proposal:  # its time was up before the ranks could agree that it was
                why = proposal["stalled"]
            raise CheckpointStallError(f"{save.path} was not saved: {why}") from late
        finally:
            save.number = self._ranks.meetings["save"]
        if "failed" in decision:
            number, text = decision["failed"]
            return self._saves.error_of(number, text, min(_DECISION_SECONDS, self._waiting))
        if plan is None or "token" not in decision:
            return CheckpointBusyError(f"{save.path} came while an earlier save was still running")
        save.token = decision["token"]
        wait_until = math.inf if self._max_stall is None else deadline
        return replace(plan, changed=decision["replan"], wait_until=wait_until)

    def _decide(self, deadline: float, proposals: list[SaveProposal]) -> dict[str, Any]:
        """On the leading rank: what becomes of a save, from what every rank proposes.

        Returns:
            The `token` that names the attempt, and whether a rank's state needs to `replan`. Or `failed`: the number
            of an earlier save that failed, and why; all ranks raise that first. Or nothing: a rank is busy.
        """
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
            on = "" if len(proposals) == 1 else f"on rank {rank} "
            raise CheckpointStallError(f"{path} was not saved: {on}{text}")
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
