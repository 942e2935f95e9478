"""Whether the replicas of a value are equal on all ranks that have it, although only one rank stores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.state.replicas import Replicas
from ..stagers.base import StatePlan

logger = logging.getLogger(__name__)

#: How many keys a warning names.
_NAMED_KEYS = 10


class ReplicaComparisons:
    """Compares the replicas in some saves.

    Args:
        rank: this rank

    Attributes:
        replicas: of the current plan; None: there is no plan yet
        rank: see above
        warned: keys of values that differ by rank and were warned about
    """

    def __init__(self, rank: int) -> None:
        self.replicas: Replicas | None = None
        self.rank = rank
        self.warned: set[str] = set()

    def compare(self, plan: StatePlan, number: int) -> ReplicaComparison | None:
        """Compute digests of the values that other ranks have too; None: not in this save.

        Values are compared if the plan is new, and in saves 2, 4, 8 and so on, because they may diverge later.

        Args:
            plan: from `SavePlanner.share`
            number: number of the save, the same on all ranks
        """
        if self.replicas is None or not (plan.changed or number & (number - 1) == 0):
            return None
        started = time.perf_counter()
        try:
            with torch.no_grad():
                message = self.replicas.message(plan.flat, number.bit_length())
        except Exception as error:  # the save does not depend on it
            logger.warning("cannot compare what the ranks share: %s: %s", type(error).__name__, error)
            return None
        logger.debug("digests of what the ranks share in %.3f s", time.perf_counter() - started)
        return ReplicaComparison(self, self.replicas, message)


@dataclass(frozen=True)
class ReplicaComparison:
    """Values shared by several ranks, compared when the ranks begin to write.

    Attributes:
        comparisons: know what was warned about
        replicas: know the keys of the values
        message: digests, for rank 0
    """

    comparisons: ReplicaComparisons
    replicas: Replicas
    message: dict[str, Any]

    def warn_of_lost(self, different: Sequence[Sequence[int]]) -> None:
        """Warn of shared values that differ by rank: once each, on the first rank that has the value.

        Args:
            different: what `differing` has found on the leading rank
        """
        warned = self.comparisons.warned
        groups = {group for group, rank in different if rank == self.comparisons.rank}
        keys = [key for key in self.replicas.keys(groups) if key not in warned]
        warned.update(keys)
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
