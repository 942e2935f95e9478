"""Deduplication across ranks: replicated values are stored once, with about the same number of bytes on every rank.

This is Megatron's fully parallel save. It is computed once per structure, on the leading rank.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import CheckpointStageError
from .flatten import FlatState
from .parameter_names import NAMES
from .paths import key_of
from .replicas import runs_of
from .shards import holders_of_part, is_spread
from .structure import Structure

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
