"""Check with short digests that replicated values, of which only one rank stores a copy, are equal on all ranks.

Each check is bounded: it compares a few thousand values, and only a sample of a large one. The next check continues
where the last one ended.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .flatten import FlatState
from .object_digests import MOST, object_digest
from .paths import keys_of
from .structure import Structure
from .tensor_samples import tensor_digests

#: Maximum number of values in one check, per rank and over all ranks.
_AT_ONCE, _ALL_AT_ONCE = 4096, 1 << 20
#: Elements of all Python objects in a check, and the minimum per object.
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
    """

    def __init__(self, structure: Structure, share: Mapping[str, list[Any]], world_size: int) -> None:
        self._structure = structure
        self._objects: list[Run] = share["shared_objects"]
        self._tensors: list[Run] = share["shared_tensors"]
        # The values below are the same on all ranks.
        objects, tensors = share["groups"]
        self._at_once = max(1, min(_AT_ONCE, _ALL_AT_ONCE // world_size))
        self._looks = max(1, -(-(objects + tensors) // self._at_once))
        self._budget = min(max(_ELEMENTS // max(min(objects, self._at_once), 1), _FEWEST), MOST)

    def message(self, flat: FlatState, look: int) -> dict[str, Any]:
        """The digests of the values of one check, for `differing`.

        Args:
            flat: a state of this structure
            look: number of the check
        """
        first = look % self._looks * self._at_once
        groups = range(first, first + self._at_once)
        objects = [pair for pair in _pairs_of(self._objects) if pair[1] in groups]
        tensors = [pair for pair in _pairs_of(self._tensors) if pair[1] in groups]
        sums = array("I", [object_digest(flat.objects[number], self._budget) for number, _ in objects])
        sums.extend(tensor_digests([flat.tensors[self._structure.stored[number].tensor] for number, _ in tensors]))
        runs = runs_of([(group, group) for _, group in (*objects, *tensors)])
        return {"runs": runs, "sums": base64.b64encode(sums.tobytes()).decode()}

    def keys(self, groups: Collection[int]) -> list[str]:
        """The keys of this rank's values in the given groups."""
        structure = self._structure
        paths = [structure.object_paths[number] for number, group in _pairs_of(self._objects) if group in groups]
        stored = [structure.stored[number] for number, group in _pairs_of(self._tensors) if group in groups]
        return keys_of([*paths, *(structure.tensor_paths[each.tensor] for each in stored)])


def differing(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The groups whose digests differ, each with the first rank that has it: [group, rank].

    Args:
        messages: from `Replicas.message`, by rank; an empty one for a rank that has nothing to compare
    """
    first_senders: dict[tuple[str, str], int] = {}  # most ranks have the same message
    for rank, message in enumerate(messages):
        if message:
            first_senders.setdefault((repr(message["runs"]), message["sums"]), rank)
    if len(first_senders) < 2:
        return []
    first: dict[int, tuple[int, int]] = {}
    differences: dict[int, int] = {}
    for rank in first_senders.values():
        sums = array("I", base64.b64decode(messages[rank]["sums"]))
        for (_, group), digest in zip(_pairs_of(messages[rank]["runs"]), sums, strict=True):
            other, first_rank = first.setdefault(group, (digest, rank))
            if other != digest:
                differences[group] = first_rank
    return [[group, rank] for group, rank in sorted(differences.items())]
