"""Admission of a save: all ranks agree that it takes place, before anything is copied.

Unless the layout must be planned, training waits for other ranks only here. Each rank sends where it wants to save,
whether the structure of its state has changed, and its errors; rank 0 checks that the path is free and makes the token
of the attempt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

from ..core.commit.manifest import encode_metrics
from ..core.commit.names import owned_token
from ..core.storage.new_names import new_token
from ..errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStallError,
    CheckpointTimeoutError,
    RanksError,
    describe_error,
    ranks_failed,
)
from ..stagers.base import Stager
from .context import Admitted, SaveContext, SaveRequest
from .planning import SavePlanner
from .save_queue import InFlightSaves

#: Seconds within which the failure of an earlier save, known to one rank, reaches the others.
_DECISION_SECONDS = 60.0


class SaveProposal(TypedDict, total=False):
    """What one rank proposes for the next save, as JSON values.

    Attributes:
        path: absolute path of the checkpoint
        changed: the layout of its state must be planned again
        error: why the rank cannot take part
        cause: the error's type
        failed: earlier saves whose error was not raised yet: numbers and error texts
        busy: the rank would have to wait for an earlier save, and must not (`overlap`)
        stalled: what the rank has waited for as long as training may wait
    """

    path: str
    changed: bool
    error: str
    cause: str
    failed: list[tuple[int, str]]
    busy: bool
    stalled: str


@dataclass(frozen=True)
class SaveAdmission:
    """Numbers the saves of a checkpointer, and makes the ranks agree on each.

    Attributes:
        planner: inspects the state
        stager: knows whether an earlier save still holds its memory
        saves: the earlier saves
        context: the ranks, how long a save may block training, and the run, which may stop a save
    """

    planner: SavePlanner
    stager: Stager
    saves: InFlightSaves
    context: SaveContext

    def admit(self, request: SaveRequest, state_dict: Mapping[Any, Any]) -> Admitted | BaseException:
        """Agree on the next save.

        Args:
            request: what is asked for
            state_dict: the state to save

        Returns:
            What all ranks agree on; or, if the save neither takes place nor fails, the error to raise instead: that of
            an earlier save, or CheckpointBusyError.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key
            CheckpointTypeError: the metrics are not numbers by name
            CheckpointExistsError: the path is taken
            RanksError: a rank cannot take part, or has continued without this save; with one rank, its own error
            CheckpointStallError: a rank waited too long for what it needs
            CheckpointTimeoutError: a rank did not call in time
        """
        # The call waits no longer than this; a save that is not agreed on by then takes place on no rank.
        ranks, timeouts = self.context.ranks, self.context.timeouts
        deadline = ranks.outside.now() + timeouts.waiting
        proposal: SaveProposal = {"path": request.path, "failed": self.saves.drop_ended()}
        plan, failure, fields = None, None, dict[str, Any]()
        if not request.may_wait and self.stager.busy:
            proposal["busy"] = True
        else:
            try:
                if request.metrics:
                    fields = {"metrics": encode_metrics(request.metrics)}
                plan = self.planner.inspect(state_dict)
                proposal["changed"] = plan.changed
            except Exception as error:
                if ranks.world_size == 1:
                    raise
                failure = error  # raised later: the other ranks wait for this one's proposal
                proposal["error"], proposal["cause"] = describe_error(error), type(error).__name__
        # With max_stall_s the ranks wait for memory before they agree, so that they give up a save together.
        if plan is not None and timeouts.max_stall is not None and not self.stager.wait_free(deadline):
            proposal["stalled"] = self._no_memory()
        try:
            decision = self._meet(proposal, deadline)
        except RanksError as error:
            raise error from failure
        number = ranks.meetings["save"]
        if "failed" in decision:
            earlier, text = decision["failed"]
            return self.saves.error_of(earlier, text, min(_DECISION_SECONDS, timeouts.waiting))
        if plan is None or "token" not in decision:
            return CheckpointBusyError(f"{request.path} came while an earlier save was still running")
        wait_until = math.inf if timeouts.max_stall is None else deadline
        plan = replace(plan, changed=decision["replan"], wait_until=wait_until)
        return Admitted(request, plan, number, decision["token"], fields)

    def _no_memory(self) -> str:
        names = " and ".join(each.path for each in self.saves if not each.done()) or "an earlier save"
        within = f"no staging memory became free within {self.context.timeouts.waiting:g} s (checkpoint.max_stall_s)"
        return f"{within} because {names} is still being written. Save less often, or raise checkpoint.stager.arenas."

    def _meet(self, proposal: SaveProposal, deadline: float) -> dict[str, Any]:
        """Make the decision with the other ranks, or give up when training has waited as long as it may."""
        path, most = proposal["path"], self.context.timeouts.max_stall
        try:
            return dict(self.context.ranks.meet("save", proposal, partial(self._decide, deadline), deadline, path))
        except CheckpointTimeoutError as late:
            if most is None or isinstance(late, CheckpointStallError):
                raise
            why = f"{late} Training waits {most:g} s at most (checkpoint.max_stall_s)."
            # If the rank had no memory, the deadline passed before the ranks could agree on that.
            raise CheckpointStallError(f"{path} was not saved: {proposal.get('stalled', why)}") from late

    def _decide(self, deadline: float, proposals: list[SaveProposal]) -> dict[str, Any]:
        """On the leading rank: decide on a save from the proposals of all ranks.

        Returns:
            The `token` of the attempt, and whether to `replan` the layout. Or `failed`: the number and error text of an
            earlier save, which all ranks raise first. Or nothing, if a rank is busy.
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
                f"The ranks must save to one path, but rank {rank} named {first}, rank {other_rank} {other}. save "
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
        try:
            if self.context.timeouts.max_stall is None:
                self.context.run.check_path(path)
            else:
                self._check_path_until(path, deadline)
        except CheckpointError:
            raise
        except OSError as error:  # `on_error` applies to it: a bucket that is away must not end the training
            text = f"{path} was not saved: could not find out whether the path is free: {error}"
            raise CheckpointSaveError(text, error.errno) from error
        token = new_token(self.context.storage_of(path).outside)
        return {"token": owned_token(token) if self.context.run.ownership.token else token, "replan": replan}

    def _check_path_until(self, path: str, deadline: float) -> None:
        """Run `check_path` of the run on a thread that is abandoned if the storage does not answer."""
        failures: list[Exception] = []

        def check() -> None:
            try:
                self.context.run.check_path(path)
            except Exception as error:
                failures.append(error)

        outside = self.context.ranks.outside
        checking = outside.start("ckpt-look", check)
        checking.join(max(deadline - outside.now(), 0))
        if checking.is_alive():
            raise CheckpointStallError(f"{path} was not saved: its storage did not answer whether the path is free.")
        if failures:
            raise failures[0]
