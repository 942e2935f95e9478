"""Random histories: what each job of a run does is chosen by the seed of the world.

With some troubles of any kinds at any places, a case is a history that nobody has thought of.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from world.base_changes import CHANGES, new_base
from world.commands import copy_step, remove, sweep
from world.states import loss_of

from ckpt_component import CheckpointExistsError, CheckpointManager

if TYPE_CHECKING:
    from world.world import Rank

#: So many jobs do anything. Those after them train, so that a life comes to its end.
JOBS = 5
ACTIONS = ("train", "train", "train", "train", "go_back", "go_back", "remove", "sweep", "copy", "damage")


def wander(rank: Rank, choices: random.Random | None = None, *overrides: str) -> None:
    """Do what the seed chooses: the same on all ranks of a job."""
    job, choices = rank.job, choices or choices_of(rank)
    action = choices.choice(ACTIONS) if job.number <= JOBS else "train"
    rank.sleep(choices.choice((0.0, 30.0, 120.0)))
    usable = [step for step in job.found if step not in rank.world.damaged]
    if action == "go_back" and usable:
        go_back(rank, choices, *overrides)
    elif action in ("train", "go_back", "damage") or not usable:
        with rank.manager(*overrides) as manager:
            save_some(rank, manager, rank.restore(manager), choices)
        there = [step for step in rank.world.committed if step not in rank.world.damaged]
        if action == "damage" and rank.number == 0 and there:
            rank.world.flip(choices.choice(there))
    elif rank.number == 0:
        step = choices.choice(usable)
        if action == "remove":
            remove(rank, step)
        elif action == "sweep":
            sweep(rank)
        else:
            copy_step(rank, step, step + 1000 * job.number)


def go_back(rank: Rank, choices: random.Random, *overrides: str) -> None:
    """Begin at an older step, or from scratch; steps after it are given up, or else that is refused."""
    world, step = rank.world, choices.choice([0, *rank.job.found])
    later, gives_up = [each for each in rank.job.found if each > step], choices.random() < 0.7
    if gives_up:
        world.gives_up({*later, *(saved for _, saved in world.saved if saved > step)})
    where = f"checkpoint.resume={rank.path_of(step) if step else 'never'}"
    with rank.manager(where, f"checkpoint.rewind={str(gives_up).lower()}", *overrides) as manager:
        try:
            found = rank.restore(manager, least=0)
        except CheckpointExistsError as error:
            assert not gives_up, "it may go back, and was refused"
            world.refused.append(error)
            raise
        assert found == step, f"it began at {found} and not at {step}"
        assert gives_up or not {*later} & {*world.committed}, f"it began at {found}, beside {later}"
        save_some(rank, manager, step, choices)


def save_some(rank: Rank, manager: CheckpointManager, last: int, choices: random.Random) -> None:
    """Save some more steps. A base that is there stays as it was restored, or changes in some way."""
    base = None
    if rank.world.bases:
        restored = rank.world.resumed[-1].state["shared"]["base"] if last else new_base()
        base = {name: tensor.clone() for name, tensor in restored.items()}
    for step in range(last + 1, last + choices.randint(2, 5)):
        rank.sleep(1.0)
        if base is not None and choices.random() < 0.4:
            choices.choice(CHANGES)(base, choices.choice([*base]))
        rank.save(manager, step, base, metrics={"loss": loss_of(step)})


def wander_frozen(rank: Rank) -> None:
    """The same with weights that hardly change, whose files checkpoints share, whether the config names them or not."""
    choices = choices_of(rank)
    rank.world.bases[0, 0] = {name: torch.zeros_like(tensor) for name, tensor in new_base().items()}
    stager = f"checkpoint/stager={choices.choice(('none', 'shared_memory', 'zero_overhead'))}"
    declared = ["checkpoint.reuse.frozen=[shared.base.*]"] * choices.choice((0, 1))
    wander(rank, choices, stager, *declared)


def choices_of(rank: Rank) -> random.Random:
    """What decides all that is left open to a job."""
    return random.Random(f"{rank.world.case.seed} {rank.job.number}")
