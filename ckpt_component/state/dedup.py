"""Who stores what several ranks hold alike: each thing once, and about the same number of bytes on every rank.

This is Megatron's fully parallel save. It is worked out once per structure, on the leading rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from .flatten import FlatState, key_of
from .replicas import runs_of
from .structure import Structure

#: What a rank has, as plain values: tensors as [identity, bytes], objects as identities. And of the answer: numbers of
#: what it is to store; `alike`, runs of the objects and tensors that other ranks have too (`Replicas`); `groups`.
Holdings = dict[str, list[Any]]


def holdings(structure: Structure) -> Holdings:
    """What this rank has; two ranks' entries are equal when their keys, dtypes, shapes and parts of the whole are."""
    names: list[list[str]] = [[] for _ in structure.stored]
    for path, number in zip(structure.tensor_paths, structure.stored_of, strict=True):
        names[number].append(key_of(path))
    tensors = []
    for keys, stored in zip(names, structure.stored, strict=True):
        shard = structure.shards[stored.tensor]
        place = (str(stored.dtype), tuple(stored.shape), None if shard is None else (shard.offsets, tuple(shard.shape)))
        tensors.append([_identity(keys, place), stored.nbytes])
    return {"tensors": tensors, "objects": [_identity([key_of(path)], None) for path in structure.object_paths]}


def share_out(ranks: Sequence[Holdings]) -> list[Holdings]:
    """For every rank, the numbers of its tensors and objects that it is to store, and of those that others have too.

    Tensors that one rank alone has are that rank's; of the others the largest goes first, to the rank with the least
    so far. An object goes to the first rank that has it.
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    for rank, held in enumerate(ranks):
        for number, (identity, _) in enumerate(held["tensors"]):
            holders.setdefault(identity, []).append((rank, number))
    loads = [0] * len(ranks)
    stored: list[Holdings] = [{"tensors": [], "objects": []} for _ in ranks]
    shared = []
    for places in holders.values():
        rank, number = places[0]
        if len(places) == 1:
            loads[rank] += ranks[rank]["tensors"][number][1]
            stored[rank]["tensors"].append(number)
        else:
            shared.append((ranks[rank]["tensors"][number][1], places))
    for nbytes, places in sorted(shared, key=lambda entry: entry[0], reverse=True):
        rank, number = min(places, key=lambda place: (loads[place[0]], place[0]))
        loads[rank] += nbytes
        stored[rank]["tensors"].append(number)
    of_objects: dict[str, list[tuple[int, int]]] = {}
    for rank, held in enumerate(ranks):
        for number, identity in enumerate(held["objects"]):
            if identity not in of_objects:
                stored[rank]["objects"].append(number)
            of_objects.setdefault(identity, []).append((rank, number))
    for mine in stored:
        mine["tensors"].sort()
    objects, count = _alike(of_objects.values(), len(ranks), 0)
    tensors, total = _alike(holders.values(), len(ranks), count)
    for rank, mine in enumerate(stored):
        mine.update(alike=[objects[rank], tensors[rank]], groups=[count, total - count])
    return stored


def _alike(holders: Iterable[list[tuple[int, int]]], world_size: int, group: int) -> tuple[list[list[list[int]]], int]:
    """For every rank the runs of what it shares with others, groups numbered from `group`; and the next group."""
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for places in holders:
        if len(places) > 1:
            for rank, number in places:
                pairs[rank].append((number, group))
            group += 1
    return [runs_of(sorted(mine)) for mine in pairs], group


class Selection:
    """The part of a state that this rank stores.

    Args:
        structure: of all that the rank has.
        mine: numbers of stored tensors and of objects, from `share_out`.
    """

    def __init__(self, structure: Structure, mine: Holdings) -> None:
        chosen = set(mine["tensors"])
        self._tensors = [number for number, entry in enumerate(structure.stored_of) if entry in chosen]
        self._objects = list(mine["objects"])

    def of(self, flat: FlatState) -> FlatState:
        """That part of a state of the same structure."""
        return FlatState(
            tensors=[flat.tensors[number] for number in self._tensors],
            tensor_paths=[flat.tensor_paths[number] for number in self._tensors],
            objects=[flat.objects[number] for number in self._objects],
            object_paths=[flat.object_paths[number] for number in self._objects],
            containers=flat.containers,
            stateful=flat.stateful,
            shards=[flat.shards[number] for number in self._tensors],
            elsewhere=flat.elsewhere,
        )


def _identity(keys: list[str], place: Any) -> str:
    return hashlib.blake2b(repr((keys, place)).encode(), digest_size=8).hexdigest()
