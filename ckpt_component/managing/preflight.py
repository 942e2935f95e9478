"""Before the first step: check that every rank can write to the folder of the checkpoints."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..errors import CheckpointConfigError, CheckpointError
from ..storage.fencing import FencingToken
from ..storage.fs import FsOps, wait_visible
from ..storage.names import TRIAL_PREFIX, new_token
from ..storage.space import FULL
from .run_context import RunContext

logger = logging.getLogger(__name__)


def check_root(run: RunContext) -> None:
    """Make the folder where there is none, and a small file in it from every rank, which is deleted at once.

    Warns when another run that saves in the folder is alive on this host.

    Raises:
        CheckpointConfigError: a rank cannot write there; the same on all ranks.
        CheckpointTimeoutError: a rank did not take part.
    """
    fs, root, ranks = run.fs, run.root, run.ranks
    deadline = time.monotonic() + run.timeouts.stage + run.timeouts.visible
    # Rank 0 makes the folder, and the others find it.
    ranks.run_on_leader("root/made", lambda: _trial(fs, root, make=True), deadline)
    failure = None if ranks.is_leader else _failure(fs, root, run.timeouts.visible)
    ranks.decide("root/tried", failure, _refuse_failed, deadline)
    if ranks.is_leader:
        _warn_of_living_owner(fs, root)


def _warn_of_living_owner(fs: FsOps, root: str) -> None:
    try:
        owner = FencingToken(fs, root).neighbor()
    except OSError as error:
        logger.warning("the owner of %s could not be read: %s", root, error)
        return
    if owner is not None and owner.alive:
        logger.warning(
            "another run saves in %s: %s, which is still running. The run that saved there first last owns the folder; "
            "end one of the two, or give each a checkpoint.dir of its own",
            root,
            owner,
        )


def _trial(fs: FsOps, root: str, *, make: bool) -> None:
    try:
        if make:
            fs.make_folders(root)
        fs.try_folder(root, f"{TRIAL_PREFIX}{new_token()}")
    except OSError as error:
        if error.errno in FULL:
            # What fills the disk may be what a dead run left, and that is deleted when this one restores.
            logger.warning("%s is full (%s); saves fail until there is free space", root, error)
            return
        raise CheckpointConfigError(
            f"checkpoint.dir={root} cannot be written to: {error}. Name another folder; a script that only restores "
            "sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."
        ) from error


def _failure(fs: FsOps, root: str, visible: float) -> str | None:
    try:
        wait_visible(lambda: fs.is_folder(root), f"checkpoint.dir={root}", visible)
        _trial(fs, root, make=False)
    except CheckpointError as error:
        return str(error)
    return None


def _refuse_failed(failures: list[Any]) -> None:
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointConfigError(f"On rank {rank}: {text}")
