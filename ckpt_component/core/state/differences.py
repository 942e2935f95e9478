"""Which values differ between the ranks that have them, and what that says about the ranks: decided from digests."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import name_ranks
from .int_columns import column_of

#: What a rank knows of a value: it was never equal on all ranks; it is the same as when it last was; or another.
NEVER, SAME_AS_THEN, SINCE_CHANGED = range(3)
#: How many differences are described for each rank that names them.
DESCRIBED = 10


class ReplicaDifference(NamedTuple):
    """A value that differs.

    Attributes:
        group: its number, the same on all ranks
        rank: the first rank that has the value
        ranks: how the ranks differ, for a message; empty if the value was never equal on all ranks
    """

    group: int
    rank: int
    ranks: str


class _RankDigests(NamedTuple):
    """The digests of one or more ranks that sent the same message."""

    ranks: list[int]
    groups: torch.Tensor
    sums: torch.Tensor
    known: torch.Tensor


def differing(messages: Sequence[Mapping[str, Any]]) -> list[ReplicaDifference]:
    """The values whose digests differ, by group.

    Args:
        messages: from `Digests.message`, by rank; an empty one for a rank that has nothing to compare
    """
    senders: dict[tuple[str, str, str], list[int]] = defaultdict(list)  # most ranks have the same message
    for rank, message in enumerate(messages):
        if message and message["runs"]:
            senders[repr(message["runs"]), message["sums"], message["known"]].append(rank)
    if len({(runs, sums) for runs, sums, _ in senders}) < 2:
        return []
    columns = [_digests_of(messages[ranks[0]], ranks) for ranks in senders.values()]
    count = max(int(column.groups.max()) for column in columns) + 1
    first = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    sums = torch.zeros(count, dtype=torch.int64, device="cpu")
    differ = torch.zeros(count, dtype=torch.bool, device="cpu")
    agreed = torch.ones(count, dtype=torch.bool, device="cpu")
    for column in columns:  # by their first ranks
        groups, before, others = column.groups, first[column.groups], sums[column.groups]
        differ[groups] |= (before >= 0) & (others != column.sums)
        sums[groups] = others.where(before >= 0, column.sums)
        first[groups] = before.where(before >= 0, column.ranks[0])
        agreed[groups] &= column.known != NEVER
    found = differ.nonzero().flatten()
    ranks_of = _describe(found[agreed[found]], first, columns)
    described = (
        ranks_of.get(group, "differs") if is_old else ""
        for group, is_old in zip(found.tolist(), agreed[found].tolist(), strict=True)
    )
    return list(map(ReplicaDifference, found.tolist(), first[found].tolist(), described))


def parted(parts: Sequence[Sequence[int]], unchanged: Sequence[int]) -> str:
    """Say how ranks differ that had the same value before.

    Args:
        parts: the ranks, by the value that they have now
        unchanged: the ranks that have the value of before
    """
    parts = sorted(parts, key=lambda ranks: (-len(ranks), ranks))
    total = sum(map(len, parts))
    if 2 * len(parts[0]) > total > 2:
        odd = sorted(rank for part in parts[1:] for rank in part)
        differs = "differs" if len(odd) == 1 else "differ"
        return f"{_named(odd)} {differs} from {_named(parts[0])}, which agree"
    if total == 2 and len(unchanged) == 1:
        changed = next(part[0] for part in parts if part[0] != unchanged[0])
        return f"the value of rank {changed} has changed since they agreed, that of rank {unchanged[0]} has not"
    *shown, last = [*map(_named, parts[:3]), *(["others"] if len(parts) > 3 else [])]
    return f"{', '.join(shown)} and {last} differ; which of them is right is unknown"


def _describe(groups: torch.Tensor, first: torch.Tensor, columns: Sequence[_RankDigests]) -> dict[int, str]:
    """How the ranks differ in some groups: the first ones for each rank that will name them."""
    named = Counter[int]()
    wanted = []
    for group, rank in zip(groups.tolist(), first[groups].tolist(), strict=True):
        named[rank] += 1
        if named[rank] <= DESCRIBED:
            wanted.append(group)
    parts: dict[int, dict[int, list[int]]] = {group: defaultdict(list) for group in wanted}
    unchanged: dict[int, list[int]] = {group: [] for group in wanted}
    for ranks, of, sums, known in columns:
        places = torch.isin(of, column_of(wanted)).nonzero().flatten()
        for place in places.tolist():
            group = int(of[place])
            parts[group][int(sums[place])].extend(ranks)
            if known[place] == SAME_AS_THEN:
                unchanged[group].extend(ranks)
    return {group: parted(list(map(sorted, parts[group].values())), unchanged[group]) for group in wanted}


def _digests_of(message: Mapping[str, Any], ranks: list[int]) -> _RankDigests:
    groups = torch.cat(
        [torch.arange(group, group + count, dtype=torch.int64, device="cpu") for _, group, count in message["runs"]]
    )
    sums, known = (bytearray(base64.b64decode(message[name])) for name in ("sums", "known"))
    column = torch.frombuffer(sums, dtype=torch.int64)
    return _RankDigests(ranks, groups, column, torch.frombuffer(known, dtype=torch.uint8))


def _named(ranks: Sequence[int]) -> str:
    return name_ranks(ranks).lower()
