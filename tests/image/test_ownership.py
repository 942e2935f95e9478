"""Who stores what several ranks hold alike: each thing once, the bytes shared out."""

from __future__ import annotations

import torch

from ckpt_component.state.flatten import flatten
from ckpt_component.state.paths import PerRank, key_of
from ckpt_component.state.replicas import Selection, holdings, share_out
from ckpt_component.state.structure import Structure


def held_by(world_size: int, tied: bool = False) -> list[tuple[Structure, dict[str, object]]]:
    found = []
    for rank in range(world_size):
        shared = {f"w{number}": torch.zeros(1000 + number) for number in range(20)}
        if tied:
            shared["again"] = shared["w3"]
        state = {**shared, "own": PerRank(torch.zeros(50)), "step": 1, "name": PerRank("me")}
        found.append((Structure(flatten(state, rank)), state))
    return found


def test_each_is_stored_once_and_the_bytes_are_even() -> None:
    ranks = held_by(4)
    stored = share_out([holdings(structure) for structure, _ in ranks])
    keys: list[str] = []
    loads = []
    for rank, ((structure, state), mine) in enumerate(zip(ranks, stored, strict=True)):
        part = Selection(structure, mine).of(flatten(state, rank))
        keys += map(key_of, [*part.tensor_paths, *part.object_paths])
        loads.append(sum(tensor.nbytes for tensor in part.tensors))
    assert len(keys) == len(set(keys)) == 20 + 4 + 1 + 4
    assert max(loads) - min(loads) <= 4100


def test_objects_are_the_first_ranks_and_a_ranks_own_stay_with_it() -> None:
    ranks = held_by(2)
    first, second = share_out([holdings(structure) for structure, _ in ranks])
    assert len(first["objects"]) == 2 and len(second["objects"]) == 1


def test_tied_tensors_go_together() -> None:
    ranks = held_by(2, tied=True)
    stored = share_out([holdings(structure) for structure, _ in ranks])
    holders = []
    for rank, ((structure, state), mine) in enumerate(zip(ranks, stored, strict=True)):
        part = Selection(structure, mine).of(flatten(state, rank))
        names = {key_of(path) for path in part.tensor_paths}
        assert ("w3" in names) == ("again" in names)
        holders += [rank] * ("w3" in names)
    assert len(holders) == 1


def test_one_rank_stores_all() -> None:
    (structure, _), *_ = held_by(1)
    (mine,) = share_out([holdings(structure)])
    assert len(mine["tensors"]) == len(structure.stored) and len(mine["objects"]) == len(structure.object_paths)
