"""Random histories: what each job of a run does is chosen by the seed of the world.

With some troubles of any kinds at any places, a case is a history that nobody has thought of.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from world.commands import copy_step, remove, sweep
from world.states import loss_of

from ckpt_component import CheckpointExistsError, CheckpointManager

if TYPE_CHECKING:
    from world.world import Rank

#: So many jobs do anything. Those after them train, so that a life comes to its end.
JOBS = 5
ACTIONS = ("train", "train", "train", "train", "go_back", "go_back", "remove", "sweep", "copy", "damage")


def wander(rank: Rank) -> None:
    """Do what the seed chooses: the same on all ranks of a job."""
    job, choices = rank.job, random.Random(f"{rank.world.case.seed} {rank.job.number}")
    action = choices.choice(ACTIONS) if job.number <= JOBS else "train"
    rank.sleep(choices.choice((0.0, 30.0, 120.0)))
    usable = [step for step in job.found if step not in rank.world.damaged]
    if action == "go_back" and usable:
        go_back(rank, choices)
    elif action in ("train", "go_back", "damage") or not usable:
        with rank.manager() as manager:
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


def go_back(rank: Rank, choices: random.Random) -> None:
    """Begin at an older step, or from scratch; steps after it are given up, or else that is refused."""
    world, step = rank.world, choices.choice([0, *rank.job.found])
    later, gives_up = [each for each in rank.job.found if each > step], choices.random() < 0.7
    if gives_up:
        world.gives_up({*later, *(saved for _, saved in world.saved if saved > step)})
    where = f"checkpoint.resume={rank.path_of(step) if step else 'never'}"
    with rank.manager(where, f"checkpoint.rewind={str(gives_up).lower()}") as manager:
        try:
            found = rank.restore(manager, least=0)
        except CheckpointExistsError:
            if gives_up or not later:
                raise AssertionError("it may go back, and was refused") from None
            raise
        assert found == step, f"it began at {found} and not at {step}"
        assert gives_up or not later, f"it began at {found}, beside {later}"
        save_some(rank, manager, step, choices)


def save_some(rank: Rank, manager: CheckpointManager, last: int, choices: random.Random) -> None:
    """Save some more steps."""
    for step in range(last + 1, last + choices.randint(2, 5)):
        rank.sleep(1.0)
        rank.save(manager, step, metrics={"loss": loss_of(step)})
