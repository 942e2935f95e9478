"""Before the first step: can every rank write to the folder of the checkpoints? Better now than after hours."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..coordination import Coordinator
from ..errors import CheckpointConfigError, CheckpointError
from ..saving.report import Timeouts
from ..storage.fencing import Ownership
from ..storage.fs import FsOps, wait_visible
from ..storage.names import TRIAL_PREFIX, new_token
from ..storage.space import FULL

logger = logging.getLogger(__name__)


def check_root(fs: FsOps, root: str, ranks: Coordinator, timeouts: Timeouts) -> None:
    """Make the folder where there is none, and a small file in it from every rank, which is deleted at once.

    Warns when another run that saves in the folder is alive on this host.

    Args:
        fs: where effects go.
        root: absolute path of the folder.
        ranks: how the ranks agree.
        timeouts: until all have come, and until all see the folder.

    Raises:
        CheckpointConfigError: a rank cannot write there; the same on all ranks.
        CheckpointTimeoutError: a rank did not come.
    """
    deadline = time.monotonic() + timeouts.stage + timeouts.visible
    try:
        # Rank 0 makes the folder, and the others find it.
        ranks.lead("root/made", lambda: _trial(fs, root, make=True), deadline)
        ranks.pool("root/tried", None if ranks.leads else _said(fs, root, timeouts.visible), _refuse_failed, deadline)
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise  # a rank is gone, or did not come
        raise CheckpointConfigError(str(error)) from error
    if ranks.leads:
        _warn_of_living_owner(fs, root)


def _warn_of_living_owner(fs: FsOps, root: str) -> None:
    try:
        owner = Ownership(fs, root).neighbor()
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
            logger.warning("%s is full (%s); saves fail until there is room", root, error)
            return
        raise CheckpointError(
            f"checkpoint.dir={root} cannot be written to: {error}. Name another folder; a script that only restores "
            "sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."
        ) from error


def _said(fs: FsOps, root: str, visible: float) -> str | None:
    try:
        wait_visible(lambda: fs.is_folder(root), f"checkpoint.dir={root}", visible)
        _trial(fs, root, make=False)
    except CheckpointError as error:
        return str(error)
    return None


def _refuse_failed(said: list[Any]) -> None:
    for rank, text in enumerate(said):
        if text is not None:
            raise CheckpointError(f"On rank {rank}: {text}")
