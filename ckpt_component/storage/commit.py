"""The commit protocol: a checkpoint appears complete under its name, or not at all.

`begin` creates the folder of an attempt; the ranks write their files into it; `publish` adds the coordinator's files
(`.metadata`, then the manifest) and commits; `abandon` removes a failed attempt. The manifest is written last, because
it marks the checkpoint as complete.

There are two ways to commit. On file systems with atomic renames, an attempt collects its files in a hidden folder
next to its target and is committed by renaming that folder to the target. Elsewhere (mounted object stores), each
attempt has a folder inside the target, named by its token, and is committed by creating `manifest.json` in the target,
which only one attempt can do.

A checkpoint of a single file has no manifest: the file is renamed from the hidden folder to the target, over the file
that was there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    CheckpointUnreadableError,
)
from .cleanup import discard, remove_if_empty
from .fencing import check_owner
from .manifest import MAX_BYTES, VERSION, encode_manifest, read_manifest
from .names import MANIFEST, QUARANTINED, Attempt, is_token
from .storage import Storage
from .visibility import wait_visible

logger = logging.getLogger(__name__)

#: How often to recreate a parent folder that another attempt removed concurrently because it was empty.
_TRIES = 5


def refuse_existing(path: str, *, by_rename: bool = True) -> None:
    """Raise CheckpointExistsError when `path` holds anything that conflicts with a new attempt."""
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        names = os.listdir(path)
        # Without renames, other attempts and quarantined data do not conflict.
        compatible = not by_rename and MANIFEST not in names and (QUARANTINED in names or all(map(is_token, names)))
        if not names or compatible:
            return
    raise CheckpointExistsError(
        f"{path} already exists, and a checkpoint is never written over anything; save to a new path, or move it away."
    )


def refuse_folder(path: str) -> None:
    """Raise CheckpointExistsError when `path`, where a single file is to be saved, is a folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise CheckpointExistsError(f"{path} is a folder, and a file is to be saved there; save to another path.")


def begin(fs: Storage, attempt: Attempt) -> None:
    """Durably create the folder of an attempt. Raises CheckpointExistsError when the target path is taken."""
    if attempt.file:
        refuse_folder(attempt.target)
    else:
        refuse_existing(attempt.target, by_rename=attempt.by_rename)
    parent = os.path.dirname(attempt.staging)
    for tries_left in reversed(range(_TRIES)):
        try:
            fs.make_folder(attempt.staging)
            break
        except FileNotFoundError:
            if not tries_left:
                raise
            fs.make_folders(parent)
    fs.sync_folder(parent)
    if not attempt.by_rename:
        fs.sync_folder(os.path.dirname(parent))  # another attempt may have created the target and not synced it yet


def publish(
    fs: Storage,
    attempt: Attempt,
    ranks: Sequence[Mapping[str, Any]],
    sidecars: Mapping[str, bytes],
    manifest_fields: Mapping[str, Any] | None,
    visibility_timeout: float = 0.0,
) -> int:
    """Commit an attempt. When this returns, the checkpoint is complete and durable.

    Args:
        fs: the file system.
        attempt: the attempt passed to `begin`.
        ranks: what each rank wrote: `{"rank", "files": [{"name", "size", ...}]}`, each file fsynced by its writer.
        sidecars: small files that only the coordinator writes, such as `.metadata`.
        manifest_fields: additional plain values for the manifest, such as the format. None, only with a commit by
            rename: no manifest is written, for the copy of another program's checkpoint.
        visibility_timeout: seconds to wait for files of other ranks to become visible here, and for a manifest whose
            creation was not confirmed.

    Returns:
        The number of files in the checkpoint.

    Raises:
        CheckpointExistsError: the target name was taken concurrently; the target stays untouched.
        CheckpointFencedError: another run took over the folder.
        CheckpointSaveError: a file has the wrong size, or it is unknown whether the manifest was created; in that case
            the next start decides by what is on disk.
        OSError: from the file system. Nothing is visible then, unless rolling back the last step failed too, which is
            logged as a warning.
    """
    staging, files = attempt.staging, list[dict[str, Any]]()
    for rank in ranks:
        for entry in rank["files"]:
            path = os.path.join(staging, entry["name"])
            if rank["rank"]:
                _wait_for_size(fs, path, entry["size"], visibility_timeout)
            size = fs.size(path)
            if size != entry["size"]:
                raise CheckpointSaveError(
                    f"{entry['name']} has {size} bytes on disk and its writer reported {entry['size']}; not committed."
                )
            files.append(dict(entry))
    if attempt.file:
        _replace(fs, attempt)
        return 1
    if manifest_fields is None:
        fs.sync_folder(staging)
        _rename(fs, attempt)
        return len(files)
    for name, data in sidecars.items():
        fs.write_new(os.path.join(staging, name), data)
        files.append({"name": name, "size": len(data), "crc32": zlib.crc32(data)})
    content = {
        "version": VERSION,
        "attempt": attempt.token,
        "world_size": len(ranks),
        "created": time.time(),
        "files": files,
        **manifest_fields,
    }
    if not attempt.by_rename:
        content["at"] = attempt.token
    manifest = encode_manifest(content)
    path = os.path.join(staging, MANIFEST if attempt.by_rename else f"{MANIFEST}.draft")
    fs.write_new(path, manifest)
    fs.sync_folder(staging)
    if attempt.owner:  # as late as possible, because the run may have been suspended until now
        check_owner(fs, os.path.dirname(attempt.target), attempt.owner)
    if attempt.by_rename:
        _rename(fs, attempt)
    else:
        _put(fs, attempt, manifest, path, visibility_timeout)
    return len(files) + 1


def is_over(fs: Storage, attempt: Attempt) -> bool:
    """Whether an attempt was already committed or abandoned. Raises CheckpointError when that cannot be read.

    Called after this rank has written its files.
    """
    if not fs.is_folder(attempt.staging):
        return True
    if attempt.file:
        return fs.size(os.path.join(attempt.staging, attempt.file)) is None
    return not attempt.by_rename and _committed_token(fs, attempt.target) == attempt.token


def abandon(fs: Storage, attempt: Attempt) -> None:
    """Remove the files of a failed attempt. Errors are only logged: the error of the save matters more."""
    if attempt.by_rename:
        if fs.is_folder(attempt.staging):
            discard(fs, attempt.staging)
        return
    try:
        if fs.is_folder(attempt.staging):
            if is_over(fs, attempt):
                return  # the failure came after the commit
            fs.remove_tree(attempt.staging)
        if fs.is_real_folder(attempt.target):
            remove_if_empty(fs, attempt.target)
    except (CheckpointError, OSError) as error:
        logger.warning("%s could not be removed and stays until the next start: %s", attempt.staging, error)


def _wait_for_size(fs: Storage, path: str, size: int, seconds: float) -> None:
    """Wait for another rank's file to become visible with its full size."""
    with contextlib.suppress(CheckpointTimeoutError):  # the caller reports the size it finds
        wait_visible(lambda: fs.size(path) == size, path, seconds)


def _rename(fs: Storage, attempt: Attempt) -> None:
    """Commit by renaming the staging folder, which has its manifest, to the target."""
    target = attempt.target
    if fs.is_real_folder(target):
        remove_if_empty(fs, target)  # if it is not empty, the rename fails with the right error
    try:
        fs.rename_new(attempt.staging, target)
    except FileExistsError as error:
        raise _taken(target) from error
    try:
        fs.sync_folder(os.path.dirname(target))
    except OSError:
        # The save is reported as failed, so readers must not find it: remove it again.
        discard(fs, target)
        raise


def _replace(fs: Storage, attempt: Attempt) -> None:
    """Commit a single file by renaming it over the target."""
    fs.replace(os.path.join(attempt.staging, attempt.file), attempt.target)
    fs.sync_folder(os.path.dirname(attempt.target))
    try:
        fs.remove_tree(attempt.staging)
    except OSError as error:
        logger.warning("%s is saved, and %s could not be deleted (%s)", attempt.target, attempt.staging, error)


def _put(fs: Storage, attempt: Attempt, manifest: bytes, draft: str, timeout: float) -> None:
    """Commit by creating the manifest, which names the folder of the attempt, in the target.

    Args:
        fs: the file system.
        attempt: an attempt whose files are complete.
        manifest: content of the manifest.
        draft: path of a file with the same content.
        timeout: seconds to keep reading the manifest back when its creation was not confirmed.
    """
    target = attempt.target
    try:
        fs.put_new(os.path.join(target, MANIFEST), manifest, draft)
    except OSError as error:
        _confirm(fs, attempt, manifest, error, timeout)
    try:
        fs.sync_folder(target)
    except OSError:
        # The save is reported as failed, so readers must not find it.
        _take_back(fs, target)
        raise
    try:
        fs.unlink(draft)
    except OSError as error:
        logger.warning("%s is committed, and %s in it could not be deleted (%s)", target, draft, error)


def _confirm(fs: Storage, attempt: Attempt, manifest: bytes, error: OSError, timeout: float) -> None:
    """After a failed or unanswered put: return if the manifest was created nevertheless, else raise."""
    target = attempt.target
    with contextlib.suppress(CheckpointTimeoutError):  # the read below raises
        wait_visible(lambda: _is_readable(fs, target), target, timeout)
    try:
        token = _committed_token(fs, target)
    except CheckpointCorruptError as read_error:
        if not isinstance(read_error, CheckpointUnreadableError) and _holds_part(fs, target, manifest):
            _take_back(fs, target)  # the store shows files before they are complete: this is not a commit
            raise error from read_error
        raise CheckpointSaveError(
            f"Could not find out whether {target} was committed: {error}, and then {read_error} The next start decides "
            "by what is on disk.",
            error.errno,
        ) from error
    if token is None:
        raise error
    if token != attempt.token:
        raise _taken(target) from error
    logger.warning("%s is committed, although its last step reported an error: %s", target, error)


def _is_readable(fs: Storage, target: str) -> bool:
    """Whether the manifest can be read, or is known to be missing."""
    try:
        read_manifest(fs, target)
    except CheckpointUnreadableError:
        return False
    except CheckpointError:
        pass  # it was read, and is invalid
    return True


def _committed_token(fs: Storage, target: str) -> str | None:
    """The token of the committed attempt, or None. Raises CheckpointError when the manifest cannot be read."""
    manifest = read_manifest(fs, target)
    return None if manifest is None else str(manifest.get("attempt"))


def _holds_part(fs: Storage, target: str, manifest: bytes) -> bool:
    try:
        content = fs.read(os.path.join(target, MANIFEST), MAX_BYTES)
    except OSError:
        return False  # the caller reports that the outcome is unknown
    return len(content) < len(manifest) and manifest.startswith(content)


def _take_back(fs: Storage, target: str) -> None:
    try:
        fs.unlink(os.path.join(target, MANIFEST))
        fs.sync_folder(target)
    except OSError as error:
        logger.warning("%s could not be rolled back (%s), so it may be found although its save failed", target, error)


def _taken(target: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{target} was taken by another save in the meantime; this save was given up.")
