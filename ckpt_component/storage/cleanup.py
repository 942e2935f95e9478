"""What becomes of folders later: checkpoints are deleted or quarantined, and what dead runs left is swept away.

How a folder was committed (see `commit`) is seen on disk. Where it was not renamed it may hold several attempts, and
none touches another's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Iterator

from ..errors import CheckpointError
from .fs import FsOps
from .liveness import LifeSigns
from .manifest import MAX_BYTES, data_folder, read_manifest
from .names import (
    ALIVE_PREFIX,
    MANIFEST,
    QUARANTINED,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    StepNames,
    is_owned_token,
    is_token,
    is_token_of_this_host,
    quarantine_path,
    token_of,
    trash_path,
)

logger = logging.getLogger(__name__)


def discard(fs: FsOps, path: str) -> bool:
    """Delete a checkpoint or a staging folder, manifest first. Returns False, and warns, when that failed."""
    try:
        if _is_renamed(fs, path):
            # Out of sight first, so that nobody sees a part of it.
            trash = trash_path(path)
            fs.rename_new(path, trash)
            fs.sync_folder(os.path.dirname(path))
            if fs.size(os.path.join(trash, MANIFEST)) is not None:
                fs.unlink(os.path.join(trash, MANIFEST))
            fs.remove_tree(trash)
            return True
        manifest, data = read_manifest(fs, path), path
        if manifest is not None:
            data = data_folder(path, manifest)
            fs.unlink(os.path.join(path, MANIFEST))
            fs.sync_folder(path)
        fs.remove_tree(data)
        if data != path:
            remove_if_empty(fs, path)  # quarantined data or a late attempt may be beside it
    except (CheckpointError, OSError) as error:
        logger.warning("%s could not be deleted (%s); it is not a checkpoint and may be deleted by hand", path, error)
        return False
    return True


def quarantine(fs: FsOps, path: str) -> str:
    """Put a damaged checkpoint aside, durably; returns where its data is now.

    Nothing in this package lists, counts, loads or deletes it from then on. The step's own name is free, so that the
    run can save that step again.

    Raises:
        OSError: it could not be done; the checkpoint stays where it is.
    """
    if _is_renamed(fs, path):
        target = quarantine_path(path)
        fs.rename_new(path, target)
        fs.sync_folder(os.path.dirname(path))
        return target
    # The data stays and is marked, so that a sweep leaves it alone; then the manifest is deleted.
    manifest = os.path.join(path, MANIFEST)
    try:
        content = fs.read(manifest, MAX_BYTES)
    except FileNotFoundError:
        content = b"{}\n"
    folders = _data_folders(fs, path)
    for folder in folders:
        fs.write_over(os.path.join(folder, QUARANTINED), content)
    if os.path.lexists(manifest):
        fs.unlink(manifest)
        fs.sync_folder(path)
    return folders[0]


def sweep(fs: FsOps, root: str, steps: StepNames, fenced: Collection[str] = ()) -> list[str]:
    """Delete what dead processes left in `root`: unfinished and half-deleted checkpoints.

    What belongs to a living process (trainer, or a writer process that is still finishing) stays, see `liveness`; and
    so does everything that has another host's mark or another prefix. Returns the names that were deleted.

    Args:
        fs: where effects go.
        root: folder of the checkpoints.
        steps: how steps are named there.
        fenced: names of `leftovers` that cannot be committed any more, whichever host they are of.
    """
    signs = LifeSigns(fs, root)
    deleted = []
    for name in _unfinished(fs, root, steps, signs.names):
        here = is_token_of_this_host(token_of(name))
        if not here and name not in fenced:
            continue
        path = os.path.join(root, name)
        try:
            if not _is_dead(fs, signs, name, here=here):
                continue
            if not fs.is_real_folder(path):
                fs.unlink(path)
            else:
                if fs.atomic_rename and name.startswith(STAGING_PREFIX):
                    # A process that wakes up late finds all of it or nothing.
                    path, staging = trash_path(path), path
                    fs.rename_new(staging, path)
                fs.remove_tree(path)
        except FileNotFoundError:
            continue  # it was committed or deleted concurrently
        except OSError as error:
            logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
            continue
        deleted.append(name)
    _remove_empty_steps(fs, signs, steps, {os.path.dirname(name) for name in deleted})
    return deleted


def living_attempts(fs: FsOps, root: str, steps: StepNames) -> list[str]:
    """Attempts in `root` that a living process of this host still works on."""
    signs = LifeSigns(fs, root)
    living = []
    for name in _unfinished(fs, root, steps, signs.names):
        path, token = os.path.join(root, name), token_of(name)
        try:
            if not _is_attempt(name) or not is_token_of_this_host(token) or not signs.is_alive(path, token):
                continue
        except FileNotFoundError:
            continue  # it was committed or deleted concurrently
        except OSError as error:
            logger.warning("whether a process works on %s cannot be seen (%s); it is not waited for", path, error)
            continue
        if not _is_kept(fs, root, name):
            living.append(name)
    return living


def leftovers(fs: FsOps, root: str, steps: StepNames) -> set[str]:
    """Names of what runs left in `root` that owned it, which is for the next owner to delete: of any host."""
    return {
        name
        for name in _unfinished(fs, root, steps, fs.names(root))
        if not _is_attempt(name) or (is_owned_token(token_of(name)) and not _is_kept(fs, root, name))
    }


def attempts_in(fs: FsOps, folder: str) -> list[str]:
    """The tokens of the attempts that have their files inside a checkpoint's folder, committed or not."""
    if not fs.is_real_folder(folder):
        return []
    return [name for name in fs.names(folder) if is_token(name) and fs.is_real_folder(os.path.join(folder, name))]


def is_quarantined(fs: FsOps, folder: str) -> bool:
    """Whether the data in a folder is only kept to be looked at."""
    return fs.size(os.path.join(folder, QUARANTINED)) is not None


def remove_if_empty(fs: FsOps, folder: str) -> None:
    """Delete a folder unless something is in it."""
    try:
        fs.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _is_renamed(fs: FsOps, path: str) -> bool:
    """Whether an existing folder is moved as a whole: renames are possible, and no attempts have their files in it."""
    return fs.atomic_rename and not attempts_in(fs, path)


def _data_folders(fs: FsOps, path: str) -> list[str]:
    """Where the data of a damaged checkpoint is; every place where it may be if the manifest cannot tell."""
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(fs, path)
        if manifest is not None:
            return [data_folder(path, manifest)]
    signs, folders = LifeSigns(fs, os.path.dirname(path)), []
    for token in attempts_in(fs, path):
        folder = os.path.join(path, token)
        if not signs.is_alive(folder, token) and not is_quarantined(fs, folder):
            folders.append(folder)
    return folders or [path]


def _unfinished(fs: FsOps, root: str, steps: StepNames, names: list[str]) -> Iterator[str]:
    """Names below `root` of attempts, half-deleted folders and small files; some attempts are kept (`_is_kept`)."""
    for name in names:
        if name.startswith((STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX)):
            yield name
        elif steps.step(name) is not None:
            try:
                yield from [f"{name}/{token}" for token in attempts_in(fs, os.path.join(root, name))]
            except OSError as error:
                logger.warning("what dead runs left in %s cannot be seen (%s)", os.path.join(root, name), error)


def _is_attempt(name: str) -> bool:
    return "/" in name or name.startswith(STAGING_PREFIX)


def _is_kept(fs: FsOps, root: str, name: str) -> bool:
    """Whether an attempt's folder is the data of a checkpoint, or may be."""
    step, _, token = name.rpartition("/")
    if not step:
        return False
    if is_quarantined(fs, os.path.join(root, name)):
        return True
    try:
        manifest = read_manifest(fs, os.path.join(root, step))
    except CheckpointError:
        return True  # which data it names is unknown; the scan reports what is wrong with it
    return manifest is not None and manifest.get("at") == token


def _is_dead(fs: FsOps, signs: LifeSigns, name: str, *, here: bool) -> bool:
    """Whether a folder or a small file is no longer needed; `here`: a process of this host made it."""
    path = os.path.join(signs.root, name)
    if fs.is_real_folder(path):
        # In this order: once it is not alive, it cannot be committed any more.
        alive = signs.is_alive(path, token_of(name), here=here)
        return not (alive or _is_kept(fs, signs.root, name) or signs.is_young(path))
    if fs.size(path) is None:
        return False
    if here and name.startswith(TRIAL_PREFIX):
        return not signs.is_young(path)  # its owner is about to delete it
    return signs.is_quiet(path)


def _remove_empty_steps(fs: FsOps, signs: LifeSigns, steps: StepNames, emptied: Collection[str]) -> None:
    """Without renames an empty folder of a step is what is left of an attempt that began or ended there."""
    for name in signs.names:
        path = os.path.join(signs.root, name)
        if steps.step(name) is None or (fs.atomic_rename and name not in emptied):
            continue
        try:
            if fs.is_real_folder(path) and not fs.names(path) and (name in emptied or not signs.is_young(path)):
                remove_if_empty(fs, path)
        except OSError as error:
            logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
