"""The commit protocol: a checkpoint appears whole under its name, or not at all.

`begin` makes a staging folder; the ranks write their files into it; `publish` adds what only the coordinator knows
(`.metadata`, then the manifest) and has the `Layout` commit it. `abandon` removes a failed attempt. The manifest comes
last because it is what makes a checkpoint complete.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointExistsError, CheckpointSaveError, CheckpointTimeoutError
from .fencing import check_owner
from .fs import FsOps, wait_visible
from .layout import Layout, PutLayout, is_folder
from .liveness import AttemptLock
from .manifest import VERSION

#: By `Attempt.by_rename`.
_LAYOUTS: dict[bool, type[Layout]] = {True: Layout, False: PutLayout}


@dataclass(frozen=True)
class Attempt:
    """One try to make the checkpoint `target`.

    Attributes:
        target: absolute path of the checkpoint to be.
        token: identifies this attempt.
        owner: the run that must own the folder of the target at the commit; empty: anyone may commit there.
        by_rename: whether the commit renames the staging folder (`Layout`) or puts the manifest (`PutLayout`).
    """

    target: str
    token: str
    owner: str = ""
    by_rename: bool = True

    @property
    def staging(self) -> str:
        """The folder that collects the files: beside the target until the commit, or in it for good."""
        return _LAYOUTS[self.by_rename].staging(self.target, self.token)


def refuse_existing(path: str, *, by_rename: bool = True) -> None:
    """Raise CheckpointExistsError when `path` holds anything that the layout does not allow beside a new attempt."""
    if not os.path.lexists(path) or (is_folder(path) and _LAYOUTS[by_rename].is_free(os.listdir(path))):
        return
    raise CheckpointExistsError(
        f"{path} already exists, and a checkpoint is never written over anything; save to a new path, or move it away."
    )


def begin(fs: FsOps, attempt: Attempt) -> None:
    """Make the staging folder of an attempt. Raises CheckpointExistsError when its target's path is taken."""
    refuse_existing(attempt.target, by_rename=attempt.by_rename)
    _LAYOUTS[attempt.by_rename](fs).begin(attempt.staging)


def lock(fs: FsOps, attempt: Attempt) -> AttemptLock:
    """Show, until it is closed, that this process works on an attempt that has begun."""
    return AttemptLock(fs, os.path.dirname(attempt.target), attempt.token, attempt.staging)


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
        CheckpointSaveError: it is unknown whether the manifest was put; what is on disk decides later.
        OSError: from the file system; nothing is visible then, unless the file system refuses even to take back the
            last step, which is a warning.
    """
    files: list[dict[str, Any]] = []
    for rank in ranks:
        for entry in rank["files"]:
            _check_size(fs, attempt, entry, visibility_timeout if rank["rank"] else 0.0)
            files.append(dict(entry))
    for name, data in sidecars.items():
        fs.write_new(os.path.join(attempt.staging, name), data)
        files.append({"name": name, "size": len(data), "crc32": zlib.crc32(data)})
    content = {
        "version": VERSION,
        "attempt": attempt.token,
        "world_size": len(ranks),
        "created": time.time(),
        "files": files,
        **manifest_fields,
    }

    def check() -> None:
        """As late as possible: a run that was stopped learns here what happened during that time."""
        if attempt.owner:
            check_owner(fs, os.path.dirname(attempt.target), attempt.owner)

    _LAYOUTS[attempt.by_rename](fs).commit(attempt.target, content, check, visibility_timeout)
    return len(files) + 1


def is_over(fs: FsOps, attempt: Attempt) -> bool:
    """Whether an attempt was committed or abandoned already. Raises CheckpointError when that cannot be seen."""
    return _LAYOUTS[attempt.by_rename](fs).is_over(attempt.target, attempt.token)


def abandon(fs: FsOps, attempt: Attempt) -> None:
    """Remove what a failed attempt left. A failure here is logged: the save's own error matters more."""
    _LAYOUTS[attempt.by_rename](fs).abandon(attempt.target, attempt.token)


def _check_size(fs: FsOps, attempt: Attempt, entry: Mapping[str, Any], visibility_timeout: float) -> None:
    """A file must have the size that its writer reported; one of another rank may be seen a while later."""
    path, reported = os.path.join(attempt.staging, entry["name"]), entry["size"]
    if visibility_timeout:
        with contextlib.suppress(CheckpointTimeoutError):  # the error below says which size it has
            wait_visible(lambda: fs.size(path) == reported, path, visibility_timeout)
    size = fs.size(path)
    if size != reported:
        raise CheckpointSaveError(
            f"{entry['name']} has {size} bytes on disk and its writer reported {reported}; not committed."
        )
