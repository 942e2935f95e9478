"""Whether the replicas of a value are equal on all ranks that have it, although only one rank stores it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from ..config.schema import Checkpoint
from ..core.options import OnDifferentReplicas, ReplicaCheck
from ..errors import ReplicasDifferError
from ..stagers.base import StatePlan
from ..state.compare import DESCRIBED, ReplicaDifference
from ..state.digests import HASHES, installed_hashes
from ..state.replicas import Digests, Holdings, LastAgreement, Replicas, Share, holdings, share_out
from ..state.structure import Structure

logger = logging.getLogger(__name__)


class ReplicaComparisons:
    """Compares the replicas, and says which ones differ.

    Args:
        rank: this rank
        world_size: number of ranks
        settings: what is compared, and what follows if it differs

    Attributes:
        fails: whether a save with different replicas fails
        rank: see above
        last: the digests of equal values; for the save thread
        warned: keys of values that were warned about, and how; for the save thread
    """

    def __init__(self, rank: int, world_size: int, settings: Checkpoint) -> None:
        self.fails = settings.on_different_replicas is OnDifferentReplicas.error
        self.rank = rank
        self.last = LastAgreement()
        self.warned: set[tuple[str, bool]] = set()
        self._world_size = world_size
        self._check = settings.check_replicas
        self._replicas: Replicas | None = None

    def holdings(self, structure: Structure) -> Holdings:
        """What this rank has, and which hashes of all bytes it can compute; for `share_out_hashes`."""
        hashes = installed_hashes() if self._check is ReplicaCheck.all else []
        return {**holdings(structure), "hashes": hashes}

    def planned(self, structure: Structure, share: Share) -> None:
        """Compare what this plan shares, from the next save on."""
        if self._check is not ReplicaCheck.off:
            self._replicas = Replicas(structure, share, self._world_size)

    def compare(self, plan: StatePlan, number: int) -> ReplicaComparison | None:
        """Compute digests of the values that other ranks have too; None: not in this save.

        The tensors are read in the call, before training may change them; with `zero_overhead` too, so that all ranks
        compare the same moment. `all` makes training wait for about half as long as a copy of the replicated bytes
        takes, so it is not the default. Samples are compared if the plan is new, and in saves 2, 4, 8 and so on,
        because values may diverge later.

        Args:
            plan: from `SavePlanner.share`
            number: number of the save, the same on all ranks

        Raises:
            Exception: the values cannot be compared, and a save with different ones is to fail
        """
        replicas = self._replicas
        if replicas is None or not (replicas.are_whole or plan.changed or number & (number - 1) == 0):
            return None
        started = perf_counter()
        try:
            with torch.no_grad():
                digests = replicas.digest(plan.flat, number.bit_length())
        except Exception as error:
            if self.fails:
                raise
            logger.warning("cannot compare what the ranks share: %s: %s", type(error).__name__, error)
            return None
        logger.debug("digests of what the ranks share in %.3f s", perf_counter() - started)
        return ReplicaComparison(self, digests)


@dataclass(frozen=True)
class ReplicaComparison:
    """Values shared by several ranks, compared when the ranks begin to write. For the save thread.

    Attributes:
        comparisons: know what was compared before
        digests: of the values on this rank
    """

    comparisons: ReplicaComparisons
    digests: Digests

    def message(self) -> dict[str, Any]:
        """What the leading rank needs to compare."""
        return self.digests.message(self.comparisons.last.known(self.digests))

    def report(self, differences: Sequence[ReplicaDifference]) -> list[str]:
        """Warn of values that differ: once each, on the first rank that has the value.

        Args:
            differences: what `differing` has found on the leading rank

        Returns:
            What there is to say of the values that this rank is the first to have, also if it was logged before.
        """
        comparisons, replicas = self.comparisons, self.digests.replicas
        comparisons.last.add(self.digests, {each.group for each in differences})
        own = [each for each in differences if each.rank == comparisons.rank]
        keys = replicas.keys({each.group for each in own})
        texts = []
        for text_of, was_equal in ((_text_of_first, False), (_text_of_later, True)):
            found = {keys[each.group]: each.ranks for each in own if bool(each.ranks) is was_equal}
            if not found:
                continue
            texts.append(text_of(found))
            new = {key: ranks for key, ranks in found.items() if (key, was_equal) not in comparisons.warned}
            comparisons.warned.update((key, was_equal) for key in new)
            if new and not comparisons.fails:
                logger.warning("%s", text_of(new))
        return texts


def share_out_hashes(ranks: Sequence[Holdings]) -> list[Share]:
    """On the leading rank: `share_out`, with the hashes that all ranks can compute, the best one first."""
    common = [name for name in HASHES if all(name in rank["hashes"] for rank in ranks)]
    return [{**share, "hashes": common} for share in share_out(ranks)]


def raise_different(path: str, messages: Sequence[Sequence[str]]) -> None:
    """On the leading rank: raise what the ranks say of different replicas.

    Args:
        path: of the save that fails
        messages: from `ReplicaComparison.report`, by rank

    Raises:
        ReplicasDifferError: always
    """
    raise ReplicasDifferError(
        f"{path} was not saved, because replicas differ (checkpoint.on_different_replicas=error): "
        + " ".join(text for message in messages for text in message)
    )


def _text_of_first(ranks_of: Mapping[str, str]) -> str:
    """Of values that were never equal, by key."""
    differ = "value differs" if len(ranks_of) == 1 else "values differ"
    return (
        f"{len(ranks_of)} {differ} by rank, and only one rank's value is saved: {_listed(list(map(repr, ranks_of)))}. "
        "Wrap what every rank needs back as its own (PerRank(value), from ckpt_component import PerRank), or make it "
        "equal on all ranks before the save."
    )


def _text_of_later(ranks_of: Mapping[str, str]) -> str:
    """Of values that were equal at an earlier save: how the ranks differ, by key."""
    differ = "value differs" if len(ranks_of) == 1 else "values differ"
    was = "was" if len(ranks_of) == 1 else "were"
    named = [f"{key!r} ({ranks})" for key, ranks in ranks_of.items()]
    return (
        f"{len(ranks_of)} {differ} by rank but {was} equal at an earlier save, and only one rank's value is saved: "
        f"{_listed(named)}. The memory of a rank may be damaged, its device may compute wrong, or the script does not "
        "synchronize the value."
    )


def _listed(named: list[str]) -> str:
    more = f" and {len(named) - DESCRIBED} more" if len(named) > DESCRIBED else ""
    return ", ".join(named[:DESCRIBED]) + more
