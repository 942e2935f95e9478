"""How the ranks agree, once per structure, on what each of them stores, and whether their replicas are equal."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.memory.gc_control import collector_paused, give_back_freed
from ..core.state.dedup import holdings, share_out
from ..core.state.replicas import Replicas
from ..core.writing.request import EncodedSave
from ..errors import ranks_failed
from ..stagers.base import Stager, StatePlan, check_objects
from ..writers.base import Writer
from .context import SaveContext

logger = logging.getLogger(__name__)

#: How many keys a warning names.
_NAMED_KEYS = 10


@dataclass(frozen=True)
class ReplicaComparison:
    """Values shared by several ranks, compared when the ranks begin to write.

    Attributes:
        replicas: knows the keys of the values
        message: digests, for rank 0
    """

    replicas: Replicas
    message: dict[str, Any]


class SavePlanner:
    """Inspects states, and agrees with the other ranks on their plans.

    Args:
        stager: inspects a state, and keeps the plan of its structure
        writer: the format, which says whether replicated values are stored once
        context: the ranks and the deadlines
    """

    def __init__(self, stager: Stager, writer: Writer, context: SaveContext) -> None:
        self._stager = stager
        self._ranks = context.ranks
        self._timeout = context.timeouts.stage
        self._shares = writer.shared and context.ranks.world_size > 1
        self._plans = 0
        #: False after the ranks could not agree: then all plan again.
        self._is_agreed = True
        self._replicas: Replicas | None = None
        #: Keys of values that differ by rank and were warned about.
        self._warned: set[str] = set()

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
        if not (plan.changed and self._shares):
            return plan
        self._plans += 1
        self._is_agreed = False
        deadline = min(time.monotonic() + self._timeout, plan.wait_until)
        with collector_paused():
            share = self._ranks.scatter(f"plan/{self._plans}", holdings(plan.structure), share_out, deadline)
            self._replicas = Replicas(plan.structure, share, self._ranks.world_size)
        self._is_agreed = True
        return replace(plan, share=share)

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan on all ranks together, and allocate memory, so that the first save is as fast as others.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed; with several ranks a RanksError on all
        """
        ranks = self._ranks
        ranks.check_world()
        deadline = time.monotonic() + self._timeout
        try:
            plan = self.inspect(state_dict)
            check_objects(plan.flat)
        except Exception as error:
            if ranks.world_size > 1:  # the others wait for this one, and all raise the same
                ranks.meet("prewarm", {"error": str(error)}, _any_changed, deadline)
            raise
        plan = replace(plan, changed=ranks.meet("prewarm", {"changed": plan.changed}, _any_changed, deadline))
        self._stager.prewarm(self.share(plan))

    def compare(self, plan: StatePlan, number: int) -> ReplicaComparison | None:
        """Compute digests of the values that other ranks have too; None: not in this save.

        Values are compared if the plan is new, and in saves 2, 4, 8 and so on, because they may diverge later.

        Args:
            plan: from `share`
            number: number of the save, the same on all ranks
        """
        if self._replicas is None or not (plan.changed or number & (number - 1) == 0):
            return None
        started = time.perf_counter()
        try:
            with torch.no_grad():
                message = self._replicas.message(plan.flat, number.bit_length())
        except Exception as error:  # the save does not depend on it
            logger.warning("cannot compare what the ranks share: %s: %s", type(error).__name__, error)
            return None
        logger.debug("digests of what the ranks share in %.3f s", time.perf_counter() - started)
        return ReplicaComparison(self._replicas, message)

    def warn_of_lost(self, comparison: ReplicaComparison | None, different: Sequence[Sequence[int]]) -> None:
        """Warn of shared values that differ by rank: once each, on the first rank that has the value.

        Args:
            comparison: that of this rank
            different: what `differing` has found on the leading rank
        """
        groups = {group for group, rank in different if rank == self._ranks.rank}
        if comparison is None or not groups:
            return
        keys = [key for key in comparison.replicas.keys(groups) if key not in self._warned]
        self._warned.update(keys)
        if keys:
            more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
            logger.warning(
                "%d %s by rank, and only one rank's value is saved: %s%s. Wrap what every rank needs back as its own "
                "(PerRank(value), from ckpt_component import PerRank), or make it equal on all ranks before the save.",
                len(keys),
                "value differs" if len(keys) == 1 else "values differ",
                ", ".join(map(repr, keys[:_NAMED_KEYS])),
                more,
            )


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
