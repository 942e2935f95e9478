"""The values that several ranks have, although only one of them stores each, and digests of them to compare.

A check of samples is bounded: it has a few thousand values, and only a sample of a large one. The next check continues
where the last one ended. A full check has all bytes of all values.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.storage.checksum import find_checksum
from ..errors import CheckpointStageError
from .compare import NEVER, SAME_AS_THEN, SINCE_CHANGED
from .digests import MOST, FullDigests, object_digest
from .flatten import FlatState
from .parameter_names import NAMES
from .paths import key_of, keys_of
from .shards import holders_of_part, is_spread
from .structure import Structure
from .tensors import column_of, tensor_digests
from .unchanged_tensors import name_of

#: Maximum number of values in one check of samples, per rank and over all ranks.
_AT_ONCE, _ALL_AT_ONCE = 4096, 1 << 20
#: Elements of all Python objects in a check of samples, and the minimum per object.
_ELEMENTS, _FEWEST = 1 << 16, 16

#: A run of consecutive values: [number of the first, number of its group, length].
Run = list[int]


def runs_of(numbers: Sequence[tuple[int, int]]) -> list[Run]:
    """Run-length encode pairs of numbers that both increase by one from pair to pair."""
    runs: list[Run] = []
    for number, group in numbers:
        if runs and number == runs[-1][0] + runs[-1][2] and group == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([number, group, 1])
    return runs


def _pairs_of(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """The inverse of `runs_of`."""
    return [(number + offset, group + offset) for number, group, count in runs for offset in range(count)]


class Replicas:
    """The values of this rank that other ranks have too. Each such value has a group number, the same on all ranks.

    Args:
        structure: structure of everything that the rank has
        share: from `share_out`; the groups of objects come first
        world_size: number of ranks

    Attributes:
        are_whole: whether all bytes are compared: all ranks have a hash for it
    """

    def __init__(self, structure: Structure, share: Mapping[str, list[Any]], world_size: int) -> None:
        self._structure = structure
        pairs = [sorted(_pairs_of(share[kind]), key=_group) for kind in ("shared_objects", "shared_tensors")]
        #: Numbers of the shared objects and tensors, and the groups of both, in ascending order.
        self._objects, self._tensors = ([number for number, _ in each] for each in pairs)
        self._groups = [group for each in pairs for _, group in each]
        # The values below are the same on all ranks.
        objects, tensors = share["groups"]
        self._at_once = max(1, min(_AT_ONCE, _ALL_AT_ONCE // world_size))
        self._looks = max(1, -(-(objects + tensors) // self._at_once))
        self._budget = min(max(_ELEMENTS // max(min(objects, self._at_once), 1), _FEWEST), MOST)
        self._hash = find_checksum(share["hashes"][0]).of if share["hashes"] else None
        self.are_whole = self._hash is not None
        self._full: FullDigests | None = None
        self._runs = runs_of([(group, group) for group in self._groups]) if self.are_whole else []

    def digest(self, flat: FlatState, look: int) -> Digests:
        """Digests of all bytes of all values, or of samples of the values of one check.

        Args:
            flat: a state of this structure
            look: number of the check
        """
        if self._hash is not None:
            sums = array("Q", [object_digest(flat.objects[number], None) for number in self._objects])
            if self._full is None:
                numbers = [self._structure.stored[number].tensor for number in self._tensors]
                self._full = FullDigests(flat, numbers, self._hash)
            sums.extend(self._full.of(flat))
            return Digests(self, 0, self._groups, self._runs, sums)
        first = look % self._looks * self._at_once
        start, end = bisect_left(self._groups, first), bisect_left(self._groups, first + self._at_once)
        sums = array("Q", [object_digest(flat.objects[number], self._budget) for number in self._objects[start:end]])
        before = len(self._objects)
        tensors = self._tensors[max(start - before, 0) : max(end - before, 0)]
        sums.extend(tensor_digests([flat.tensors[self._structure.stored[number].tensor] for number in tensors]))
        groups = self._groups[start:end]
        return Digests(self, start, groups, runs_of([(group, group) for group in groups]), sums)

    @property
    def names(self) -> list[Any]:
        """What identifies each value also in other structures, in the order of the groups."""
        objects = [(self._structure.object_paths[number], "object") for number in self._objects]
        return [*objects, *(name_of(self._structure, number) for number in self._tensors)]

    def keys(self, groups: Collection[int]) -> dict[int, str]:
        """The keys of this rank's values in the given groups, by group."""
        structure = self._structure
        paths = [structure.object_paths[number] for number in self._objects]
        paths += [structure.tensor_paths[structure.stored[number].tensor] for number in self._tensors]
        found = {group: path for group, path in zip(self._groups, paths, strict=True) if group in groups}
        return dict(zip(found, keys_of(list(found.values())), strict=True))


@dataclass(frozen=True)
class Digests:
    """The digests of one check.

    Attributes:
        replicas: the values
        start: place of the first value of the check among all
        groups: of the values of the check
        runs: the same, as runs
        sums: their digests
    """

    replicas: Replicas
    start: int
    groups: list[int]
    runs: list[Run]
    sums: array[int]

    def message(self, known: bytes) -> dict[str, Any]:
        """What the leading rank compares; `known` is from `LastAgreement`."""
        return {"runs": self.runs, "sums": _text(self.sums.tobytes()), "known": _text(known)}


class LastAgreement:
    """The digest that each value had on this rank when it was last equal on all ranks. For one thread.

    It follows the values from plan to plan by their names.
    """

    def __init__(self) -> None:
        self._replicas: Replicas | None = None
        self._sums = column_of(())
        self._agreed = torch.zeros(0, dtype=torch.bool, device="cpu")

    def known(self, digests: Digests) -> bytes:
        """For each value of a check: NEVER equal before, SAME_AS_THEN, or SINCE_CHANGED."""
        self._follow(digests.replicas)
        sums, within = _column(digests.sums), _within(digests)
        known = torch.where(self._sums[within] == sums, SAME_AS_THEN, SINCE_CHANGED)
        return bytes(known.where(self._agreed[within], NEVER).tolist())

    def add(self, digests: Digests, different: Collection[int]) -> None:
        """Record that all values of a check were equal, except those of the groups `different`."""
        self._follow(digests.replicas)
        sums, within = _column(digests.sums), _within(digests)
        equal = torch.ones(len(sums), dtype=torch.bool, device="cpu")
        for group in different:
            place = bisect_left(digests.groups, group)
            if digests.groups[place : place + 1] == [group]:
                equal[place] = False
        self._sums[within] = sums.where(equal, self._sums[within])
        self._agreed[within] |= equal

    def _follow(self, replicas: Replicas) -> None:
        if replicas is self._replicas:
            return
        names, old = replicas.names, [] if self._replicas is None else self._replicas.names
        place_of = {name: place for place, name in enumerate(old)}
        places = [(new, place_of[name]) for new, name in enumerate(names) if name in place_of]
        into, source = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        sums = torch.zeros(len(names), dtype=torch.int64, device="cpu")
        agreed = torch.zeros(len(names), dtype=torch.bool, device="cpu")
        sums[into], agreed[into] = self._sums[source], self._agreed[source]
        self._replicas, self._sums, self._agreed = replicas, sums, agreed


def _within(digests: Digests) -> slice:
    return slice(digests.start, digests.start + len(digests.sums))


def _column(sums: array[int]) -> torch.Tensor:
    return torch.frombuffer(sums, dtype=torch.int64) if sums else column_of(())


def _group(pair: tuple[int, int]) -> int:
    return pair[1]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


#: What a rank has, as plain values: the identities of `tensors` and `objects`, the `bytes` of the tensors, and what
#: identifies the `names` of the parameters of its optimizers, by key.
Holdings = dict[str, Any]
#: What a rank is to store: numbers of `tensors` and `objects`. And which values other ranks have too (`Replicas`): runs
#: of its `shared_objects` and `shared_tensors`, and the numbers of `groups` of objects and tensors, same on all ranks.
Share = dict[str, list[Any]]

#: For `likely_bytes`: a bit more than what a format puts around a tensor, and around all of them.
_ITEM_BYTES, _FILE_BYTES = 1 << 10, 64 << 12


def holdings(structure: Structure) -> Holdings:
    """What this rank has. Entries of two ranks are equal if their keys, dtypes, shapes and shards are equal."""
    keys: list[list[str]] = [[] for _ in structure.stored]
    for path, number in zip(structure.tensor_paths, structure.stored_of, strict=True):
        keys[number].append(key_of(path))
    tensors = []
    for names, stored in zip(keys, structure.stored, strict=True):
        shard = structure.shards[stored.tensor]
        part = None if shard is None else (shard.offsets, tuple(shard.shape))
        tensors.append(_identity(names, str(stored.dtype), tuple(stored.shape), part))
    return {
        "tensors": tensors,
        "bytes": [stored.nbytes for stored in structure.stored],
        "objects": [_identity(key_of(path)) for path in structure.object_paths],
    }


def names_held(flat: FlatState) -> dict[str, str]:
    """What identifies the names of the parameters of each optimizer in a state, by key."""
    return {
        key_of(path): _identity(value)
        for path, value in zip(flat.object_paths, flat.objects, strict=True)
        if path[-1] == NAMES and isinstance(value, list)
    }


def share_out(ranks: Sequence[Holdings]) -> list[Share]:
    """Decide, on the leading rank, what each rank stores.

    A tensor that only one rank has is stored by that rank. Of the others the largest is assigned first, to the rank
    with the fewest bytes so far. An object is stored by the first rank that has it.

    Raises:
        CheckpointStageError: an optimizer has other parameters on another rank, so that their numbers would be mixed up
    """
    _refuse_other_parameters([holding.get("names", {}) for holding in ranks])
    shares: list[Share] = [{"tensors": [], "objects": []} for _ in ranks]
    objects, tensors = _holders(ranks, "objects"), _holders(ranks, "tensors")
    for (rank, number), *_ in objects:
        shares[rank]["objects"].append(number)
    loads = [0] * len(ranks)
    unshared = [holders for holders in tensors if len(holders) == 1]
    shared = [holders for holders in tensors if len(holders) > 1]
    shared.sort(key=lambda holders: ranks[holders[0][0]]["bytes"][holders[0][1]], reverse=True)
    for holders in (*unshared, *shared):
        rank, number = min(holders, key=lambda holder: (loads[holder[0]], holder[0]))
        loads[rank] += ranks[rank]["bytes"][number]
        shares[rank]["tensors"].append(number)
    group = 0
    for kind, all_holders in (("objects", objects), ("tensors", tensors)):
        pairs: list[list[tuple[int, int]]] = [[] for _ in ranks]
        first = group
        for holders in all_holders:
            if len(holders) > 1:
                for rank, number in holders:
                    pairs[rank].append((number, group))
                group += 1
        for share, shared_with in zip(shares, pairs, strict=True):
            share[f"shared_{kind}"] = runs_of(sorted(shared_with))
            share.setdefault("groups", []).append(group - first)
    for share in shares:
        share["tensors"].sort()
    return shares


def likely_bytes(structure: Structure, flat: FlatState, rank: int, world_size: int) -> int:
    """Estimate the size of a rank's image without asking the others, as if all had states like this one.

    A tensor that is not distributed counts as replicated on all ranks.
    """
    alone, shared = 0.0, list[int]()
    for stored in structure.stored:
        placed = flat.placed.get(stored.tensor)
        holders = holders_of_part(placed) if placed is not None and is_spread(placed) else world_size
        if holders == world_size:
            shared.append(stored.nbytes + _ITEM_BYTES)
        else:
            alone += (stored.nbytes + _ITEM_BYTES) / holders
    loads = [(0, number) for number in range(world_size)]  # as in `share_out`
    for nbytes in sorted(shared, reverse=True):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + nbytes, number))
    (own,) = (load for load, number in loads if number == rank)
    return int(alone) + own + _FILE_BYTES


def _holders(ranks: Sequence[Holdings], kind: str) -> list[list[tuple[int, int]]]:
    """For every distinct value, the ranks that have it, each with the value's number on that rank."""
    holders: dict[str, list[tuple[int, int]]] = {}
    for rank, holding in enumerate(ranks):
        for number, identity in enumerate(holding[kind]):
            holders.setdefault(identity, []).append((rank, number))
    return list(holders.values())


def _refuse_other_parameters(ranks: Sequence[Mapping[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, names in enumerate(ranks):
        for key, identity in names.items():
            other, known = first.setdefault(key, (rank, identity))
            if known != identity:
                optimizer = key.removesuffix(f".{NAMES}")
                raise CheckpointStageError(
                    f"'{optimizer}' has other parameters on rank {rank} than on rank {other}, whose state has the same "
                    f"numbers; give the optimizer of each pipeline stage a name of its own, such as '{optimizer}_0'. A "
                    "load finds the state of a parameter under any of them."
                )


def _identity(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Selection:
    """The part of a state that this rank stores.

    Args:
        structure: structure of everything that the rank has
        share: this rank's share from `share_out`
    """

    def __init__(self, structure: Structure, share: Share) -> None:
        stored = set(share["tensors"])
        self._tensors = [number for number, entry in enumerate(structure.stored_of) if entry in stored]
        self._objects = share["objects"]

    def of(self, flat: FlatState) -> FlatState:
        """Select that part of a state of the same structure."""
        return replace(
            flat,
            tensors=[flat.tensors[number] for number in self._tensors],
            tensor_paths=[flat.tensor_paths[number] for number in self._tensors],
            objects=[flat.objects[number] for number in self._objects],
            object_paths=[flat.object_paths[number] for number in self._objects],
            shards=[flat.shards[number] for number in self._tensors],
            placed={new: flat.placed[old] for new, old in enumerate(self._tensors) if old in flat.placed},
        )
