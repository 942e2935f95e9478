"""How the ranks agree, once per structure, on what each of them stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.gc_control import collector_paused
from ..core.pages import give_back_freed
from ..core.writing.request import EncodedSave
from ..errors import ranks_failed
from ..formats.writer import Writer
from ..stagers.base import Stager, StatePlan, check_objects
from ..state.replicas import names_held
from .context import SaveContext
from .replica_comparison import ReplicaComparisons, share_out_hashes


class SavePlanner:
    """Inspects states, and agrees with the other ranks on their plans.

    Args:
        stager: inspects a state, and keeps the plan of its structure
        writer: the format, which says whether replicated values are stored once
        context: the ranks and the deadlines

    Attributes:
        comparisons: compare the values that several ranks have; None: there are none
    """

    def __init__(self, stager: Stager, writer: Writer, context: SaveContext) -> None:
        self._stager = stager
        self._ranks = context.ranks
        self._timeout = context.timeouts.stage
        self._plans = 0
        #: False after the ranks could not agree: then all plan again.
        self._is_agreed = True
        self.comparisons = (
            ReplicaComparisons(context.ranks.rank, context.ranks.world_size, context.settings)
            if writer.shared and context.ranks.world_size > 1
            else None
        )

    def inspect(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        """Inspect a state; see `Stager.inspect`. No rank waits."""
        plan = self._stager.inspect(state_dict)
        return plan if self._is_agreed else replace(plan, changed=True)

    def share(self, plan: StatePlan) -> StatePlan:
        """If the plan is new, agree with the other ranks which of them stores what.

        Args:
            plan: that all ranks agree to make, or not to make

        Returns:
            The plan, with the part of this rank.
        """
        if not plan.changed or self.comparisons is None:
            return plan
        self._plans += 1
        self._is_agreed = False
        deadline = min(self._ranks.outside.now() + self._timeout, plan.wait_until)
        with collector_paused():
            own = {**self.comparisons.holdings(plan.structure), "names": names_held(plan.flat)}
            share = self._ranks.scatter(f"plan/{self._plans}", own, share_out_hashes, deadline)
            self.comparisons.planned(plan.structure, share)
        self._is_agreed = True
        return replace(plan, share=share)

    def prewarm(self, state_dict: Mapping[Any, Any], *, wait: bool = True) -> None:
        """Plan on all ranks together, and allocate memory, so that the first save is as fast as others.

        Args:
            state_dict: a state of the structure that will be saved
            wait: return when the memory is there; False: it may still be in the making, in the background

        Raises:
            CheckpointStageError: a value that cannot be checkpointed; with several ranks a RanksError on all
        """
        ranks = self._ranks
        ranks.check_world()
        deadline = self._ranks.outside.now() + self._timeout
        try:
            plan = self.inspect(state_dict)
            check_objects(plan.flat)
        except Exception as error:
            if ranks.world_size > 1:  # the others wait for this one, and all raise the same
                ranks.meet("prewarm", {"error": str(error)}, _any_changed, deadline)
            raise
        plan = replace(plan, changed=ranks.meet("prewarm", {"changed": plan.changed}, _any_changed, deadline))
        plan = self.share(plan)
        if wait:
            self._stager.prewarm(plan)
        else:
            self._stager.prepare(plan)


class RankIndexes:
    """Where the ranks store their items: sent to the leading rank once per table, which makes the index files of them.

    All ranks replan together, so the leading rank gets all indexes or none.

    Args:
        writer: makes the index files
        files: files of the run, which belong into every checkpoint too

    Attributes:
        sidecars: the files that the commit adds, by name; empty but on the leading rank
    """

    def __init__(self, writer: Writer, files: Mapping[str, bytes]) -> None:
        self.sidecars: Mapping[str, bytes] = {}
        self._writer = writer
        self._files = files
        #: The table whose index was sent, and on the leading rank those of all ranks, of which `sidecars` are made.
        self._sent: int | None = None
        self._tables: list[int] = []

    def message(self, encoded: EncodedSave) -> dict[str, Any]:
        """What the leading rank must be told of this rank's part of a save. If that fails, call `forget`."""
        sent, self._sent = self._sent, encoded.table.number
        if sent == self._sent:
            return {"table": sent}
        return {"table": self._sent, "rank_index": encoded.rank_index()}

    def forget(self) -> None:
        """It is not known what the leading rank has."""
        self._sent = None

    def collect(self, tables: list[int], messages: Sequence[Mapping[str, Any]]) -> None:
        """On the leading rank: take the messages of all ranks, in order; `tables` are those in the messages."""
        if tables != self._tables:
            index = self._writer.index([message["rank_index"] for message in messages])
            self.sidecars, self._tables = {**index, **self._files}, tables
            give_back_freed()


def _any_changed(messages: list[dict[str, Any]]) -> bool:
    """On the leading rank: whether the ranks must plan. Raises an error if a rank could not inspect its state."""
    failures = {rank: message["error"] for rank, message in enumerate(messages) if "error" in message}
    if failures:
        raise ranks_failed(failures)
    return any(message["changed"] for message in messages)
