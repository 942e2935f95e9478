"""The commit protocol: a checkpoint appears whole under its name, or not at all.

`begin` makes a staging folder beside the target; the ranks write their files into it; `publish` adds what
only the coordinator knows (`.metadata`, then `manifest.json` as the last file), makes all of it durable and renames
the folder to its name. `abandon` takes a failed attempt away. RELIABILITY 4.2 has the reasons for the order.

Where folders cannot be renamed in one step (object stores), every attempt has a folder of its own inside the target,
and `put_commit` puts the manifest beside these folders (RELIABILITY 4.5).
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

from ..errors import CheckpointError, CheckpointExistsError, CheckpointSaveError, CheckpointTimeoutError
from .cleanup import discard, remove_if_empty
from .fencing import check_owner
from .fs import FsOps
from .liveness import AttemptLock
from .manifest import VERSION, encode_manifest
from .names import MANIFEST, QUARANTINED, is_token, staging_path
from .put_commit import holder, put_manifest
from .visibility import wait_visible

logger = logging.getLogger(__name__)

#: How often a folder is made again that somebody who gave up took away just then, as it was empty.
_TRIES = 5


@dataclass(frozen=True)
class Attempt:
    """One try to make the checkpoint `target`.

    Attributes:
        target: absolute path of the checkpoint to be.
        token: tells this attempt from all others.
        owner: the run that must own the folder of the target at the commit; empty: anyone may commit there.
        by_rename: whether the commit renames the staging folder; else it puts the manifest (`FsOps.atomic_rename`).
    """

    target: str
    token: str
    owner: str = ""
    by_rename: bool = True

    @property
    def staging(self) -> str:
        """The folder that collects the files: beside the target until the commit, or in it for good."""
        return staging_path(self.target, self.token) if self.by_rename else os.path.join(self.target, self.token)


def refuse_existing(path: str, *, by_rename: bool = True) -> None:
    """Raise CheckpointExistsError when `path` holds anything; an empty folder may be taken over.

    Args:
        path: of the checkpoint to be.
        by_rename: False: what other attempts have there, or what is quarantined, is in nobody's way.
    """
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        names = os.listdir(path)
        if not names or (not by_rename and _leaves_room(names)):
            return
    raise CheckpointExistsError(
        f"{path} already exists, and a checkpoint is never written over anything; save to a new path, or move it away."
    )


def begin(fs: FsOps, attempt: Attempt) -> None:
    """Make the staging folder of an attempt. Raises CheckpointExistsError when its target's path is taken."""
    refuse_existing(attempt.target, by_rename=attempt.by_rename)
    parent = os.path.dirname(attempt.staging)
    for number in range(1, _TRIES + 1):
        fs.make_folders(parent)
        try:
            fs.make_folder(attempt.staging)
        except FileNotFoundError:
            if number == _TRIES:
                raise
            continue  # the last one to leave took the folder of the checkpoint away
        break
    fs.sync_folder(parent)
    if not attempt.by_rename:
        fs.sync_folder(os.path.dirname(parent))  # another attempt may have made the folder, and not synced it yet


def lock(fs: FsOps, attempt: Attempt) -> AttemptLock:
    """Show, until it is closed, that this process works on an attempt that has begun."""
    return AttemptLock(fs, os.path.dirname(attempt.target), attempt.token, attempt.staging)


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
        visible: seconds until what other ranks wrote must be seen here, and a manifest whose put was not answered.

    Returns:
        How many files the checkpoint has.

    Raises:
        CheckpointExistsError: something took the target's name meanwhile; it stays untouched.
        CheckpointFencedError: another run took the folder over.
        CheckpointSaveError: whether the manifest was put cannot be seen; what is on disk decides later.
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
    if attempt.by_rename:
        _rename(fs, attempt, encode_manifest(content))
    else:
        data = encode_manifest({**content, "at": attempt.token})
        put_manifest(fs, attempt.target, attempt.token, data, lambda: _check_owner(fs, attempt), visible)
    return len(files) + 1


def is_over(fs: FsOps, attempt: Attempt) -> bool:
    """Whether an attempt was committed or abandoned already. Raises CheckpointError when that cannot be seen."""
    if not os.path.isdir(attempt.staging):
        return True
    return not attempt.by_rename and holder(fs, attempt.target) == attempt.token


def abandon(fs: FsOps, attempt: Attempt) -> None:
    """Take away what a failed attempt left. A failure here is logged: the save's own error matters more."""
    if attempt.by_rename:
        if os.path.isdir(attempt.staging):
            discard(fs, attempt.staging)
        return
    try:
        if os.path.isdir(attempt.staging):
            if is_over(fs, attempt):
                return  # it failed after its commit
            discard(fs, attempt.staging)
        if os.path.isdir(attempt.target) and not os.path.islink(attempt.target):
            remove_if_empty(fs, attempt.target)
    except (CheckpointError, OSError) as error:
        logger.warning("%s stays until the next start: %s", attempt.staging, error)


def _rename(fs: FsOps, attempt: Attempt, manifest: bytes) -> None:
    fs.write_new(os.path.join(attempt.staging, MANIFEST), manifest)
    fs.sync_folder(attempt.staging)
    _check_owner(fs, attempt)
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


def _check_owner(fs: FsOps, attempt: Attempt) -> None:
    """As late as can be: what a stopped run finds here is what happened while it was stopped."""
    if attempt.owner:
        check_owner(fs, os.path.dirname(attempt.target), attempt.owner)


def _leaves_room(names: Sequence[str]) -> bool:
    return MANIFEST not in names and (QUARANTINED in names or all(map(is_token, names)))


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
