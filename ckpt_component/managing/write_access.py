"""Whether a run can save in its folder: every rank can write there, and no other run of this host saves there."""

from __future__ import annotations

import errno
import logging
import os

from ..core.commit.fencing import FencingToken
from ..core.commit.names import TRIAL_PREFIX
from ..core.commit.protocol import wait_visible
from ..core.storage.new_names import new_token
from ..core.storage.space import FULL
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointError, CheckpointInUseError
from .run_context import RESTORE_ONLY, RunContext

logger = logging.getLogger(__name__)


class WriteAccess:
    """Checks the folder of a run before the first step.

    Args:
        run: the run
        ownership: its claim to the folder, which learns whether the folder exists
        takeover: whether a run that is still running may lose the folder to this one
    """

    def __init__(self, run: RunContext, ownership: FencingToken, *, takeover: bool) -> None:
        self._run = run
        self._ownership = ownership
        self._takeover = takeover
        #: The folder with its key, for a text.
        self._named = f"checkpoint.{'dir' if run.remote is None else 'local.dir'}={run.root}"

    def check(self) -> None:
        """Make the folder if necessary, and write and delete a small file in it on every rank.

        All ranks call this, before the first step.

        Raises:
            CheckpointConfigError: a rank cannot write there; the same on all ranks
            CheckpointInUseError: another run that saves there is running on this host; on all ranks
            CheckpointTimeoutError: a rank did not take part
        """
        run, failure = self._run, None
        deadline = run.ranks.outside.now() + run.timeouts.stage + run.timeouts.visible
        # Rank 0 makes the folder, and the others wait for it.
        made = run.ranks.run_on_leader("root/made", self._try_to_write, deadline)
        self._ownership.root_exists = run.ranks.is_leader and made and run.fs.is_folder(run.root)
        if run.remote is not None:
            self._check_shared(deadline)
        if not run.ranks.is_leader:
            try:
                if made:  # else there is no room for it yet
                    wait_visible(lambda: run.fs.is_folder(run.root), self._named, run.timeouts.visible, run.fs)
                self._try_to_write()
            except CheckpointError as error:
                failure = str(error)
            except OSError as error:  # a host that has the folder, too, has ended
                failure = f"{self._named}: {error}"
        run.ranks.decide("root/tried", failure, refuse_failed, deadline)
        run.ranks.run_on_leader("root/owner", self._refuse_running, deadline)

    def _refuse_running(self) -> None:
        """Refuse a folder in which another run of this host saves; not if that is unknown, or wanted."""
        try:
            other = self._ownership.other()
        except OSError as error:
            logger.warning("the owner of %s could not be read: %s", self._run.root, error)
            return
        if other is None or not other.alive:
            return
        if other.is_of_this_process:
            logger.warning(
                "%s: another manager of this process saves there; close() the one you no longer need, because the one "
                "whose first save comes last owns the folder",
                self._named,
            )
        elif self._takeover:
            logger.warning(
                "%s: another run saves there, %s, which is still running; it can no longer commit there once this run "
                "has saved (checkpoint.takeover=true)",
                self._named,
                other,
            )
        else:
            raise CheckpointInUseError(
                f"{self._named}: another run saves there, {other}, which is still running. End it, or use another "
                "checkpoint.dir; with checkpoint.takeover=true this run takes the folder, and the next save of the "
                f"other fails (docs/failures.md#two-runs-in-one-folder). {RESTORE_ONLY}"
            )

    def _check_shared(self, deadline: float) -> None:
        """Check that the local folder is the same on all ranks, whose files a checkpoint collects."""
        run, failure = self._run, None
        name = run.ranks.run_on_leader("root/trial", self._leave_trial, deadline)
        if name is None:
            return
        trial = os.path.join(run.root, name)  # each rank looks in its own folder, which may have another name
        if not run.ranks.is_leader:
            try:
                wait_visible(lambda: run.fs.exists(trial), trial, run.timeouts.visible, run.fs)
            except CheckpointError:
                failure = (
                    f"{self._named} is another folder than that of rank 0. All ranks must share it: the disk of a host "
                    "is for the ranks of one host, a parallel file system for those of several."
                )
            except OSError as error:  # each host has its own, and is asked for it
                failure = f"{self._named}: {error}"
        try:
            run.ranks.decide("root/shared", failure, refuse_failed, deadline)
        finally:
            if run.ranks.is_leader:
                remove_trial(run.fs, trial)

    def _leave_trial(self) -> str | None:
        return leave_trial(self._run.fs, self._run.root, self._named)

    def _try_to_write(self) -> bool:
        return try_to_write(self._run.fs, self._run.root, self._named)


def try_to_write(fs: Storage, root: str, named: str) -> bool:
    """Make a folder if necessary, and write and delete a small file in it.

    Args:
        fs: its storage
        root: the folder
        named: the folder with its key, for a text

    Returns:
        False: it is full; the first save makes the folder.

    Raises:
        CheckpointConfigError: that is not possible
    """
    try:
        fs.make_folders(root)
        fs.try_folder(root, f"{TRIAL_PREFIX}{new_token(fs.outside)}")
        return True
    except OSError as error:
        if error.errno in FULL:
            # A dead run's files may fill the disk; they are deleted when this run restores.
            logger.warning("%s is full (%s); saves fail until there is free space", root, error)
            return False
        if error.errno == errno.ENOTDIR:
            raise CheckpointConfigError(f"{named} is a file, or lies below one. Name a folder.") from error
        raise CheckpointConfigError(
            f"{named} cannot be written to: {error}. Name another folder; a script that only "
            "restores sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."
        ) from error


def leave_trial(fs: Storage, root: str, named: str) -> str | None:
    """Make a file in a folder for other ranks to find, and return its name; None: that is not possible now.

    Args:
        fs: its storage
        root: the folder
        named: the folder with its key, for a text
    """
    name = f"{TRIAL_PREFIX}{new_token(fs.outside)}"
    try:
        fs.close(fs.create(os.path.join(root, name)))
    except OSError as error:  # a full disk, of which `try_to_write` has warned, or one that saves fail on
        logger.warning("%s: whether all ranks share it is not checked: %s", named, error)
        return None
    return name


def remove_trial(fs: Storage, path: str) -> None:
    """Delete what `leave_trial` has left. If that fails, a later start does it: what is told now matters more."""
    try:
        fs.unlink(path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)


def refuse_failed(failures: list[str | None]) -> None:
    """On the leading rank: raise what a rank could not do.

    Args:
        failures: the text of each rank; None: it had no failure

    Raises:
        CheckpointConfigError: a rank has failed
    """
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointConfigError(f"On rank {rank}: {text}")
