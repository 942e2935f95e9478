"""Whether two values are equal, and in which bytes and numbers two tensors differ."""

from __future__ import annotations

import base64
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import name_ranks
from .objects import DEEPEST
from .shards import local_parts, parts_of
from .tensors import ORDINARY, column_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_value(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are the same; a dict's order does not matter."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same_tensor(one, other)
    if type(one) is not type(other) or depth > DEEPEST:
        return False
    if one is other:
        return True
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other, [depth + 1] * len(one)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, (numpy.ndarray, numpy.generic)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    # A value that equals nothing is NaN; one whose comparison has no truth value counts as different.
    equal = one == other
    return equal is True or (isinstance(one, (float, complex)) and repr(one) == repr(other))


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; of distributed ones, the parts of this rank."""
    if one is other:
        return True
    if ORDINARY.issuperset((type(one), type(other))) and one.dtype == other.dtype and one.shape == other.shape:
        return _same_bytes(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts = local_parts(one, ""), local_parts(other, "")
    if [shard for _, shard in parts[0]] != [shard for _, shard in parts[1]]:
        return False
    return all(_same_bytes(first, second) for (first, _), (second, _) in zip(*parts, strict=True))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) not in ORDINARY and (parts := parts_of(one)):
        others = parts_of(other)
        is_same = type(one) is type(other) and parts.keys() == others.keys()
        return is_same and all(same_tensor(part, others[name]) for name, part in parts.items())
    if one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    other = other.detach().to(one.device)
    return torch.equal(_as_integers(one.detach()), _as_integers(other))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers, which equal themselves even where they are NaN."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.view(_INTEGERS.get(tensor.itemsize, torch.uint8))


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
