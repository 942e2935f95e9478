"""The commit protocol: a checkpoint appears whole under its name, or not at all.

`begin` makes a staging folder beside the target; the ranks write their files into it; `publish` adds what
only the coordinator knows (`.metadata`, then `manifest.json` as the last file), makes all of it durable and renames
the folder to its name. `abandon` takes a failed attempt away. RELIABILITY 4.2 has the reasons for the order.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointExistsError, CheckpointSaveError, CheckpointTimeoutError
from .fs import FsOps
from .manifest import VERSION, encode_manifest
from .names import MANIFEST, TRIAL_PREFIX, is_debris_of_this_host, staging_path, trash_path
from .owner import check_owner
from .visibility import wait_visible

logger = logging.getLogger(__name__)

_YOUNG_SECONDS = 5.0


@dataclass(frozen=True)
class Attempt:
    """One try to make the checkpoint `target`.

    Attributes:
        target: absolute path of the checkpoint to be.
        token: tells this attempt from all others.
        owner: the run that must own the folder of the target at the commit; empty: anyone may commit there.
    """

    target: str
    token: str
    owner: str = ""

    @property
    def staging(self) -> str:
        """The folder beside the target that collects the files until the commit."""
        return staging_path(self.target, self.token)


def refuse_existing(path: str) -> None:
    """Raise CheckpointExistsError when `path` holds anything; an empty folder may be taken over."""
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path):
        return
    raise CheckpointExistsError(
        f"{path} already exists, and a checkpoint is never written over anything; save to a new path, or move it away."
    )


def begin(fs: FsOps, attempt: Attempt) -> None:
    """Make the staging folder of an attempt. Raises CheckpointExistsError when its target's path is taken."""
    refuse_existing(attempt.target)
    parent = os.path.dirname(attempt.target)
    fs.make_folders(parent)
    fs.make_folder(attempt.staging)
    fs.sync_folder(parent)


def publish(
    fs: FsOps,
    attempt: Attempt,
    ranks: Sequence[Mapping[str, Any]],
    sidecars: Mapping[str, bytes],
    about: Mapping[str, Any],
    visible: float = 0.0,
) -> int:
    """Commit: the checkpoint exists, durable and complete, when this returns.

    Args:
        fs: where effects go.
        attempt: of `begin`.
        ranks: what each rank wrote: `{"rank", "files": [{"name", "size", ...}]}`, each file fsynced by its writer.
        sidecars: small files that only the coordinator writes, such as `.metadata`.
        about: further plain values for the manifest (format, package version).
        visible: seconds until what other ranks wrote must be seen here.

    Returns:
        How many files the checkpoint has.

    Raises:
        CheckpointExistsError: something took the target's name meanwhile; it stays untouched.
        CheckpointFencedError: another run took the folder over.
        OSError: from the file system; nothing is visible then, unless the file system refuses even to take back the
            last step, which is a warning.
    """
    files = [dict(entry) for rank in ranks for entry in rank["files"]]
    for rank in ranks:
        for entry in rank["files"]:
            _check_size(fs, attempt, entry, visible if rank["rank"] else 0.0)
    for name, data in sidecars.items():
        fs.write_new(os.path.join(attempt.staging, name), data)
        files.append({"name": name, "size": len(data), "crc32": zlib.crc32(data)})
    content = {
        "version": VERSION,
        "attempt": attempt.token,
        "world_size": len(ranks),
        "created": time.time(),
        "files": files,
        **about,
    }
    fs.write_new(os.path.join(attempt.staging, MANIFEST), encode_manifest(content))
    fs.sync_folder(attempt.staging)
    if attempt.owner:
        # As late as can be: what a stopped run finds here is what happened while it was stopped.
        check_owner(fs, os.path.dirname(attempt.target), attempt.owner)
    _take_over_empty_folder(fs, attempt.target)
    try:
        fs.rename_new(attempt.staging, attempt.target)
    except FileExistsError as error:
        raise CheckpointExistsError(f"{attempt.target} was taken meanwhile; this save was given up.") from error
    try:
        fs.sync_folder(os.path.dirname(attempt.target))
    except OSError:
        # Nobody may be told that this is saved, so it must not be found either: take the name away again.
        discard(fs, attempt.target)
        raise
    return len(files) + 1


def abandon(fs: FsOps, attempt: Attempt) -> None:
    """Take away what a failed attempt left. A failure here is logged: the save's own error matters more."""
    if os.path.isdir(attempt.staging):
        discard(fs, attempt.staging)


def discard(fs: FsOps, path: str) -> bool:
    """Rename a folder out of sight, then delete it, manifest first. Returns False, and warns, when that failed."""
    trash = trash_path(path)
    try:
        fs.rename_new(path, trash)
        fs.sync_folder(os.path.dirname(path))
        if fs.size(os.path.join(trash, MANIFEST)) is not None:
            fs.unlink(os.path.join(trash, MANIFEST))
        fs.remove_tree(trash)
    except OSError as error:
        logger.warning("%s could not be deleted (%s); it is not a checkpoint and may be deleted by hand", path, error)
        return False
    return True


def sweep(fs: FsOps, root: str) -> list[str]:
    """Delete what dead processes of this host left in `root`: unfinished and half-deleted checkpoints.

    A folder whose owner lives (trainer, or a writer process that is still finishing) is locked and stays, and so does
    everything that has another host's mark or another prefix. Returns the names that were deleted.
    """
    gone = []
    for name in fs.names(root):
        path = os.path.join(root, name)
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        is_trial = name.startswith(TRIAL_PREFIX) and fs.size(path) is not None
        if not is_debris_of_this_host(name) or not (is_folder or is_trial):
            continue
        try:
            # A very young folder may not have been locked by its owner yet, and a trial file is about to go.
            if (is_folder and fs.is_locked(path)) or time.time() - os.lstat(path).st_mtime < _YOUNG_SECONDS:
                continue
            if is_folder:
                fs.remove_tree(path)
            else:
                fs.unlink(path)
        except OSError as error:
            logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
            continue
        gone.append(name)
    return gone


def living_attempts(fs: FsOps, root: str) -> list[str]:
    """Staging folders in `root` that a living process of this host still works on."""
    return [
        name
        for name in fs.names(root)
        if is_debris_of_this_host(name)
        and os.path.isdir(os.path.join(root, name))
        and fs.is_locked(os.path.join(root, name))
    ]


def _check_size(fs: FsOps, attempt: Attempt, entry: Mapping[str, Any], visible: float) -> None:
    """A file must have the size that its writer reported; one of another rank may be seen a while later."""
    path, wanted = os.path.join(attempt.staging, entry["name"]), entry["size"]
    if visible:
        with contextlib.suppress(CheckpointTimeoutError):  # which size it has instead is what is told
            wait_visible(lambda: fs.size(path) == wanted, path, visible)
    size = fs.size(path)
    if size != wanted:
        raise CheckpointSaveError(
            f"{entry['name']} has {size} bytes on disk and its writer reported {wanted}; not committed."
        )


def _take_over_empty_folder(fs: FsOps, target: str) -> None:
    if os.path.isdir(target) and not os.path.islink(target):
        try:
            fs.remove_folder(target)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # Not empty any more: the rename that follows refuses it with the right words.
