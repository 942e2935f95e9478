"""What the forked children run: saves under a failpoint, and the checks after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from faults.invariants import state_of, violations_at
from kept_configs import compose_once, resolve_once

import ckpt_component.factory.graph as factory
from ckpt_component import CheckpointSaveError, build_checkpointer, build_manager
from ckpt_component.config.hydra.parts import part_class
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG

KEEP_ONE = ("checkpoint.keep.last=1", "checkpoint.save.at_end=false", "checkpoint.timeouts.close=20")

KEEP_BEST = (*KEEP_ONE, "checkpoint.keep.best.metric=loss")


def prepare(**arguments: Any) -> None:
    """In the server, before the fork: load what the child is going to need."""
    from faults.lives import SOAK

    factory.compose_checkpoint, factory.resolve_config = compose_once, resolve_once  # type: ignore[assignment, attr-defined]
    for preset in {"sync", arguments.get("preset", "sync")}:
        for overrides in ((*KEEP_ONE, *arguments.get("overrides", ())), SOAK):
            settings = resolve_once(preset, overrides)
            for kind in ("stager", "caller", "writer"):
                part_class(kind, getattr(settings, kind), object)


def crash_round(
    root: str,
    preset: str,
    acks: str,
    failpoint: str,
    log: str,
    bare: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Check what the last crash left, make the next save, and then one more with the failpoint set.

    Args:
        root: of the checkpoints.
        preset: of the last save.
        acks: the file of acknowledged steps.
        failpoint: for `CKPT_FAILPOINT`.
        log: for `CKPT_FAILPOINT_LOG`.
        overrides: of the run, beside `KEEP_ONE`.
        bare: make the last save by the checkpointer alone, without pointer and retirement after it.

    Returns:
        Where the failpoint lets it: the violations found first, and whether the last save failed.
    """
    wrong, step = violations_at(root, newest_ack(acks), overrides=overrides)
    if wrong:
        return {"violations": wrong}
    acknowledge(acks, step)
    os.environ |= {FAILPOINT: failpoint, FAILPOINT_LOG: log}
    if bare:
        with build_checkpointer(preset, (*KEEP_ONE, *overrides)) as checkpointer:
            futures = checkpointer.save(state_of(step + 1), os.path.join(root, MEGATRON.folder(step + 1)))
            if futures is not None:
                futures[1].result(60)
            acknowledge(acks, step + 1)
        return {"violations": [], "failed": None}
    failed = None
    with build_manager(preset, (*KEEP_ONE, *overrides), dir=root) as manager:
        try:
            manager.save(step + 1, state_of(step + 1))
            manager.wait()
        except CheckpointSaveError as error:
            # The writer process was killed, and the next save needs a new one.
            failed = str(error)
            manager.save(step + 2, state_of(step + 2))
            manager.wait()
            acknowledge(acks, step + 2)
        else:
            acknowledge(acks, step + 1)
    return {"violations": [], "failed": failed}


def check(root: str, acks: str, keep: int = 1, overrides: Sequence[str] = ()) -> list[str]:
    """The violations in a root after the last crash."""
    return violations_at(root, newest_ack(acks), keep, overrides=overrides)[0]


def acknowledge(acks: str, step: int) -> None:
    """Note, where no fault reaches, that the user was told that a step is saved."""
    with open(acks, "a") as stream:
        stream.write(f"{step}\n")


def newest_ack(acks: str) -> int:
    """The newest step that was acknowledged, or 0."""
    try:
        with open(acks) as stream:
            return max((int(line) for line in stream), default=0)
    except FileNotFoundError:
        return 0
