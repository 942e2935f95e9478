"""The commit without a rename: `manifest.json` appears in the checkpoint's folder, by a put that only one attempt wins.

An object store may do a put and lose its answer. Then the manifest is read back, for what is there decides
(RELIABILITY 4.5).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ..errors import CheckpointCorruptError, CheckpointExistsError, CheckpointSaveError, CheckpointUnreadableError
from .fs import FsOps
from .manifest import MAX_BYTES, read_manifest
from .names import MANIFEST

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


def put_manifest(fs: FsOps, target: str, token: str, data: bytes, check: Callable[[], None], patience: float) -> None:
    """Commit the attempt whose files are in `<target>/<token>`; it is durable when this returns.

    Args:
        fs: where effects go.
        target: folder of the checkpoint.
        token: of the attempt.
        data: the manifest, which names the token.
        check: called as late as can be; what it raises stops the commit.
        patience: seconds for which the manifest is read again where an answer was lost and a read fails.

    Raises:
        CheckpointExistsError: another attempt was first.
        CheckpointSaveError: whether this one was committed cannot be seen.
        OSError: it is not committed, unless what was put could not be taken back, which is a warning.
    """
    staging, path = os.path.join(target, token), os.path.join(target, MANIFEST)
    draft = os.path.join(staging, f"{MANIFEST}.draft")
    fs.write_new(draft, data)
    fs.sync_folder(staging)
    check()
    try:
        fs.put_new(path, data, draft)
    except OSError as error:
        _decide(fs, target, token, data, error, patience)
    try:
        fs.sync_folder(target)
    except OSError:
        # Nobody may be told that this is saved, so it must not be found either.
        _take_back(fs, target)
        raise
    try:
        fs.unlink(draft)
    except OSError as error:
        logger.warning("%s is committed, and %s in it could not be deleted (%s)", target, draft, error)


def holder(fs: FsOps, target: str) -> str | None:
    """The token of the attempt that is committed as `target`, or None; CheckpointError when that cannot be read."""
    manifest = read_manifest(fs, target)
    return None if manifest is None else str(manifest.get("attempt"))


def _decide(fs: FsOps, target: str, token: str, data: bytes, error: OSError, patience: float) -> None:
    """The put failed, or its answer did: return when it was done all the same, else raise."""
    try:
        held = _read_back(fs, target, patience)
    except CheckpointCorruptError as unread:
        if not isinstance(unread, CheckpointUnreadableError) and _is_part(fs, target, data):
            _take_back(fs, target)  # a store that shows files before they are whole; a part of one is no commit
            raise error from unread
        raise CheckpointSaveError(
            f"Whether {target} was committed is not known: {error}, and then {unread} The next start decides by what "
            "is there.",
            error.errno,
        ) from error
    if held is None:
        raise error
    if held != token:
        raise CheckpointExistsError(f"{target} was taken meanwhile; this save was given up.") from error
    logger.warning("%s is committed, although its last step was answered by an error: %s", target, error)


def _read_back(fs: FsOps, target: str, patience: float) -> str | None:
    deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
    while True:
        try:
            return holder(fs, target)
        except CheckpointUnreadableError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _is_part(fs: FsOps, target: str, data: bytes) -> bool:
    try:
        found = fs.read(os.path.join(target, MANIFEST), MAX_BYTES)
    except OSError:
        return False  # then it is not known, which is what the caller says
    return len(found) < len(data) and data.startswith(found)


def _take_back(fs: FsOps, target: str) -> None:
    try:
        fs.unlink(os.path.join(target, MANIFEST))
        fs.sync_folder(target)
    except OSError as error:
        logger.warning("%s could not be taken back (%s), so it may be found although its save failed", target, error)
