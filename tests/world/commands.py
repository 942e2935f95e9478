"""What people do to the folder of a run, beside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ckpt_component.core.commit.cleanup import Unfinished, discard
from ckpt_component.core.commit.copying import copy_checkpoint
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.formats.verification import verify_files

if TYPE_CHECKING:
    from world.world import Rank


def remove(rank: Rank, step: int) -> None:
    """Somebody deletes a checkpoint: `ckpt rm`."""
    rank.world.gives_up([step])
    with rank.call("command"):
        discard(rank.storage(""), rank.path_of(step))


def sweep(rank: Rank) -> None:
    """Somebody deletes what dead runs have left: `ckpt gc`."""
    with rank.call("command"):
        Unfinished(rank.storage(""), rank.world.root, MEGATRON).sweep()


def copy_step(rank: Rank, step: int, target: int) -> None:
    """Somebody copies a checkpoint: `ckpt cp`."""
    world, files = rank.world, rank.storage("")
    world.copies[target] = world.copies.get(step, step)
    with rank.call("command", target):
        manifest = read_manifest(files, rank.path_of(step))
        if manifest is None:
            return  # somebody has deleted it meanwhile

        def verify(staging: str, kept: Collection[str]) -> None:
            verify_files(files, staging, manifest)

        copy_checkpoint(files, rank.path_of(step), manifest, files, rank.path_of(target), verify)
    if step not in world.free:
        for job in [job for job, saved in world.saved if saved == step][-1:]:
            world.acknowledged(job, target)
