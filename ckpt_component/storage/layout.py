"""What becomes of a checkpoint's folder later, whichever way it was committed (see `commit`): deletion, quarantine.

Without renames a folder may hold several attempts, and none touches another's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os

from ..errors import CheckpointError
from .fs import FsOps
from .liveness import LifeSigns
from .manifest import MAX_BYTES, data_folder, read_manifest
from .names import MANIFEST, QUARANTINED, is_token, quarantine_path, trash_path

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


def attempts_in(fs: FsOps, folder: str) -> list[str]:
    """The tokens of the attempts that have their files inside a checkpoint's folder, committed or not."""
    if not is_folder(folder):
        return []
    return [name for name in fs.names(folder) if is_token(name) and is_folder(os.path.join(folder, name))]


def is_quarantined(fs: FsOps, folder: str) -> bool:
    """Whether the data in a folder is only kept to be looked at."""
    return fs.size(os.path.join(folder, QUARANTINED)) is not None


def is_folder(path: str) -> bool:
    """Whether there is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


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
