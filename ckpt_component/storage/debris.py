"""What saves leave behind, and who may delete it: retired checkpoints, failed attempts, and what dead processes left.

Where folders can be renamed, what goes is renamed out of sight first. Elsewhere the manifest goes first, which is what
makes a checkpoint; the attempts of one step have folders of their own below the step's, and none touches another's.
"""

from __future__ import annotations

import errno
import logging
import os
import time

from ..errors import CheckpointError
from .fs import FsOps
from .manifest import data_folder, read_manifest
from .names import (
    MANIFEST,
    QUARANTINED,
    TRIAL_PREFIX,
    StepNames,
    is_debris_of_this_host,
    is_token,
    is_token_of_this_host,
    trash_path,
)

logger = logging.getLogger(__name__)

_YOUNG_SECONDS = 5.0


def discard(fs: FsOps, path: str) -> bool:
    """Delete a checkpoint or a staging folder, manifest first. Returns False, and warns, when that failed."""
    try:
        if fs.atomic_rename and not attempts_in(fs, path):
            _discard_by_rename(fs, path)
        else:
            _discard_in_place(fs, path)
    except (CheckpointError, OSError) as error:
        logger.warning("%s could not be deleted (%s); it is not a checkpoint and may be deleted by hand", path, error)
        return False
    return True


def attempts_in(fs: FsOps, folder: str) -> list[str]:
    """The names of the attempts that have their files inside a checkpoint's folder, committed or not."""
    if not _is_folder(folder):
        return []
    return [name for name in fs.names(folder) if is_token(name) and _is_folder(os.path.join(folder, name))]


def is_quarantined(fs: FsOps, folder: str) -> bool:
    """Whether the data in a folder is kept for whoever wants to look at it, and nothing more."""
    return fs.size(os.path.join(folder, QUARANTINED)) is not None


def remove_if_empty(fs: FsOps, folder: str) -> None:
    """Delete a folder unless something stands in it."""
    try:
        fs.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def sweep(fs: FsOps, root: str, steps: StepNames) -> list[str]:
    """Delete what dead processes of this host left in `root`: unfinished and half-deleted checkpoints.

    A folder whose owner lives (trainer, or a writer process that is still finishing) is locked and stays, and so does
    everything that has another host's mark or another prefix. Returns the names that were deleted.
    """
    gone = []
    for name in fs.names(root):
        path = os.path.join(root, name)
        if steps.step(name) is not None:
            gone += [f"{name}/{attempt}" for attempt in _sweep_step(fs, path)]
            continue
        is_trial = name.startswith(TRIAL_PREFIX) and fs.size(path) is not None
        if not is_debris_of_this_host(name) or not (_is_folder(path) or is_trial):
            continue
        try:
            # A very young folder may not have been locked by its owner yet, and a trial file is about to go.
            if (not is_trial and fs.is_locked(path)) or _is_young(path):
                continue
            if is_trial:
                fs.unlink(path)
            else:
                fs.remove_tree(path)
        except OSError as error:
            _warn_left(path, error)
            continue
        gone.append(name)
    return gone


def living_attempts(fs: FsOps, root: str, steps: StepNames) -> list[str]:
    """Folders in `root` of attempts that a living process of this host still works on."""
    living = []
    for name in fs.names(root):
        path = os.path.join(root, name)
        if steps.step(name) is not None:
            living += [
                f"{name}/{attempt}"
                for attempt in attempts_in(fs, path)
                if is_token_of_this_host(attempt)
                and fs.is_locked(os.path.join(path, attempt))
                and not _is_kept(fs, path, attempt)
            ]
        elif is_debris_of_this_host(name) and _is_folder(path) and fs.is_locked(path):
            living.append(name)
    return living


def _discard_by_rename(fs: FsOps, path: str) -> None:
    trash = trash_path(path)
    fs.rename_new(path, trash)
    fs.sync_folder(os.path.dirname(path))
    if fs.size(os.path.join(trash, MANIFEST)) is not None:
        fs.unlink(os.path.join(trash, MANIFEST))
    fs.remove_tree(trash)


def _discard_in_place(fs: FsOps, path: str) -> None:
    manifest, data = read_manifest(fs, path), path
    if manifest is not None:
        data = data_folder(path, manifest)
        fs.unlink(os.path.join(path, MANIFEST))
        fs.sync_folder(path)
    fs.remove_tree(data)
    if data != path:
        remove_if_empty(fs, path)  # beside it there may be what is quarantined, or an attempt that came too late


def _sweep_step(fs: FsOps, folder: str) -> list[str]:
    """The same for the attempts inside one step's folder; returns their names."""
    gone = []
    try:
        for name in attempts_in(fs, folder):
            path = os.path.join(folder, name)
            # In this order: once it is not locked, nobody commits it any more.
            if not is_token_of_this_host(name) or fs.is_locked(path) or _is_young(path) or _is_kept(fs, folder, name):
                continue
            fs.remove_tree(path)
            gone.append(name)
        # Without renames an empty folder is what is left of an attempt that began or ended there.
        begun = not fs.atomic_rename and _is_folder(folder) and not _is_young(folder)
        if (gone or begun) and not fs.names(folder):
            remove_if_empty(fs, folder)
    except OSError as error:
        _warn_left(folder, error)
    return gone


def _is_kept(fs: FsOps, folder: str, attempt: str) -> bool:
    """Whether an attempt's folder is the data of a checkpoint, or may be."""
    if is_quarantined(fs, os.path.join(folder, attempt)):
        return True
    try:
        manifest = read_manifest(fs, folder)
    except CheckpointError:
        return True  # whose data it names cannot be known; the scan tells what is wrong with it
    return manifest is not None and manifest.get("at") == attempt


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_young(path: str) -> bool:
    return time.time() - os.lstat(path).st_mtime < _YOUNG_SECONDS


def _warn_left(path: str, error: OSError) -> None:
    logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
