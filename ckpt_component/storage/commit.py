"""The commit protocol: a checkpoint appears whole under its name, or not at all.

`begin` makes the folder of an attempt; the ranks write their files into it; `publish` adds what only the coordinator
knows (`.metadata`, then the manifest) and commits; `abandon` removes a failed attempt. The manifest comes last because
it is what makes a checkpoint complete.

There are two ways to commit. Where folders can be renamed, an attempt collects its files in a hidden folder beside its
target, which a rename makes the checkpoint. Elsewhere (mounted object stores) each attempt has a folder of its own
inside the target, named by its token, and creating `manifest.json` beside these folders, which only one attempt can
do, commits it.
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
from .fs import FsOps, wait_visible
from .manifest import MAX_BYTES, VERSION, encode_manifest, read_manifest
from .names import MANIFEST, QUARANTINED, Attempt, is_token

logger = logging.getLogger(__name__)

#: How often a folder is made again that another attempt removed in between because it was empty.
_TRIES = 5


def refuse_existing(path: str, *, by_rename: bool = True) -> None:
    """Raise CheckpointExistsError when `path` holds anything that may not be beside a new attempt."""
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        names = os.listdir(path)
        # Without renames, other attempts and what is quarantined are not in the way.
        beside = not by_rename and MANIFEST not in names and (QUARANTINED in names or all(map(is_token, names)))
        if not names or beside:
            return
    raise CheckpointExistsError(
        f"{path} already exists, and a checkpoint is never written over anything; save to a new path, or move it away."
    )


def begin(fs: FsOps, attempt: Attempt) -> None:
    """Make the folder of an attempt, durably. Raises CheckpointExistsError when its target's path is taken."""
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
        fs.sync_folder(os.path.dirname(parent))  # another attempt may have made the target and not synced it yet


def publish(
    fs: FsOps,
    attempt: Attempt,
    ranks: Sequence[Mapping[str, Any]],
    sidecars: Mapping[str, bytes],
    manifest_fields: Mapping[str, Any],
    visibility_timeout: float = 0.0,
) -> int:
    """Commit: the checkpoint exists, durable and complete, when this returns.

    Args:
        fs: where effects go.
        attempt: of `begin`.
        ranks: what each rank wrote: `{"rank", "files": [{"name", "size", ...}]}`, each file fsynced by its writer.
        sidecars: small files that only the coordinator writes, such as `.metadata`.
        manifest_fields: further plain values for the manifest (format).
        visibility_timeout: seconds until what other ranks wrote must be seen here, and a manifest whose creation was
            not confirmed.

    Returns:
        How many files the checkpoint has.

    Raises:
        CheckpointExistsError: the target's name was taken concurrently; it stays untouched.
        CheckpointFencedError: another run took the folder over.
        CheckpointSaveError: it is unknown whether the manifest was created; what is on disk decides later.
        OSError: from the file system; nothing is visible then, unless the file system refuses even to take back the
            last step, which is a warning.
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
    if attempt.owner:  # as late as possible: a run that was stopped learns here what happened during that time
        check_owner(fs, os.path.dirname(attempt.target), attempt.owner)
    if attempt.by_rename:
        _rename(fs, attempt)
    else:
        _put(fs, attempt, manifest, path, visibility_timeout)
    return len(files) + 1


def is_over(fs: FsOps, attempt: Attempt) -> bool:
    """Whether an attempt was committed or abandoned already. Raises CheckpointError when that cannot be seen."""
    if not fs.is_folder(attempt.staging):
        return True
    return not attempt.by_rename and _committed_token(fs, attempt.target) == attempt.token


def abandon(fs: FsOps, attempt: Attempt) -> None:
    """Remove what a failed attempt left. A failure here is logged: the save's own error matters more."""
    if attempt.by_rename:
        if fs.is_folder(attempt.staging):
            discard(fs, attempt.staging)
        return
    try:
        if fs.is_folder(attempt.staging):
            if is_over(fs, attempt):
                return  # it failed after its commit
            fs.remove_tree(attempt.staging)
        if fs.is_real_folder(attempt.target):
            remove_if_empty(fs, attempt.target)
    except (CheckpointError, OSError) as error:
        logger.warning("%s stays until the next start: %s", attempt.staging, error)


def _wait_for_size(fs: FsOps, path: str, size: int, seconds: float) -> None:
    """A file of another rank may be seen a while after it was written."""
    with contextlib.suppress(CheckpointTimeoutError):  # the caller's error says which size it has
        wait_visible(lambda: fs.size(path) == size, path, seconds)


def _rename(fs: FsOps, attempt: Attempt) -> None:
    """Make the folder of an attempt, which has its manifest, the checkpoint."""
    target = attempt.target
    if fs.is_real_folder(target):
        remove_if_empty(fs, target)  # if it is not empty, the rename refuses it with the right error
    try:
        fs.rename_new(attempt.staging, target)
    except FileExistsError as error:
        raise _taken(target) from error
    try:
        fs.sync_folder(os.path.dirname(target))
    except OSError:
        # The save is reported as failed, so it must not be found either: take the name away again.
        discard(fs, target)
        raise


def _put(fs: FsOps, attempt: Attempt, manifest: bytes, draft: str, timeout: float) -> None:
    """Create the manifest, which names the folder of the attempt, in the target.

    Args:
        fs: where effects go.
        attempt: whose files are complete.
        manifest: its content.
        draft: a file with this content.
        timeout: seconds for which it is read back where its creation was not confirmed.
    """
    target = attempt.target
    try:
        fs.put_new(os.path.join(target, MANIFEST), manifest, draft)
    except OSError as error:
        _confirm(fs, attempt, manifest, error, timeout)
    try:
        fs.sync_folder(target)
    except OSError:
        # The save is reported as failed, so it must not be found either.
        _take_back(fs, target)
        raise
    try:
        fs.unlink(draft)
    except OSError as error:
        logger.warning("%s is committed, and %s in it could not be deleted (%s)", target, draft, error)


def _confirm(fs: FsOps, attempt: Attempt, manifest: bytes, error: OSError, timeout: float) -> None:
    """The put failed, or its answer was lost: return when the manifest is there all the same, else raise."""
    target = attempt.target
    with contextlib.suppress(CheckpointTimeoutError):  # then what follows raises
        wait_visible(lambda: _is_readable(fs, target), target, timeout)
    try:
        token = _committed_token(fs, target)
    except CheckpointCorruptError as unread:
        if not isinstance(unread, CheckpointUnreadableError) and _holds_part(fs, target, manifest):
            _take_back(fs, target)  # a store that shows files before they are whole: this is no commit
            raise error from unread
        raise CheckpointSaveError(
            f"Could not find out whether {target} was committed: {error}, and then {unread} The next start decides by "
            "what is on disk.",
            error.errno,
        ) from error
    if token is None:
        raise error
    if token != attempt.token:
        raise _taken(target) from error
    logger.warning("%s is committed, although its last step was answered by an error: %s", target, error)


def _is_readable(fs: FsOps, target: str) -> bool:
    """Whether it can be known by now what manifest there is, if any."""
    try:
        read_manifest(fs, target)
    except CheckpointUnreadableError:
        return False
    except CheckpointError:
        pass  # it was read
    return True


def _committed_token(fs: FsOps, target: str) -> str | None:
    """The token of the committed attempt, or None; CheckpointError when that cannot be read."""
    manifest = read_manifest(fs, target)
    return None if manifest is None else str(manifest.get("attempt"))


def _holds_part(fs: FsOps, target: str, manifest: bytes) -> bool:
    try:
        content = fs.read(os.path.join(target, MANIFEST), MAX_BYTES)
    except OSError:
        return False  # then it is unknown, which is what the caller reports
    return len(content) < len(manifest) and manifest.startswith(content)


def _take_back(fs: FsOps, target: str) -> None:
    try:
        fs.unlink(os.path.join(target, MANIFEST))
        fs.sync_folder(target)
    except OSError as error:
        logger.warning("%s could not be taken back (%s), so it may be found although its save failed", target, error)


def _taken(target: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{target} was taken by another save in the meantime; this save was given up.")
