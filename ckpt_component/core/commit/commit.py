"""The commit protocol: a checkpoint appears complete under its name, or not at all.

`begin` creates the folder of an attempt; the ranks write their files into it; `publish` adds the coordinator's files
(`.metadata`, then the manifest) and commits; `abandon` removes a failed attempt. The manifest is written last, because
it marks the checkpoint as complete.

What differs between file systems and object stores is in the `CommitProtocol` of the storage: where an attempt collects
its files, and its last step. A checkpoint of a single file has no manifest.

What a save makes durable, in this order; each step is done before the next one begins:

1. the owner file of the run's folder, at its first save: `fencing.py`, `FencingToken.acquire`
2. the folder that the attempt's folder was made in: `protocol.py`, `begin`
3. on each rank its data files, all at once: `core/writing/write_job.py`
4. on each rank its `integrity-<rank>.json`, then the attempt's folder: `core/writing/write_job.py`
5. when all ranks have voted, the sidecars, such as `.metadata`, one after the other: `publish`
6. the manifest under the name of its draft, then the attempt's folder: `publish`
7. after a last look at the owner file, the new name and the folder it is in: `protocols.py`, `RenameCommit`; or
   the manifest and the target: `ManifestCommit`. From now on the checkpoint is there.
8. the pointer file and its folder: `scan.py`, `write_pointer`
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import CheckpointSaveError, CheckpointTimeoutError
from ..storage.storage import Storage
from .fencing import check_owner
from .manifest import VERSION, encode_manifest
from .protocol import Attempt, wait_visible
from .protocols import protocol_of


def refuse_existing(storage: Storage, path: str, file: str = "") -> None:
    """Raise CheckpointExistsError when `path` holds anything that conflicts with a new attempt.

    Args:
        storage: the storage
        path: path of the checkpoint
        file: see `Attempt`; a file there does not conflict with a checkpoint of a single file, which replaces it
    """
    protocol_of(storage).refuse_taken(path, file)


def new_attempt(storage: Storage, target: str, token: str, owner: str = "", file: str = "") -> Attempt:
    """A new attempt, which `begin` starts; arguments as for `Attempt`."""
    return protocol_of(storage).attempt(target, token, owner, file)


def begin(attempt: Attempt) -> None:
    """Durably create the folder of an attempt. Raises CheckpointExistsError when the target path is taken."""
    attempt.protocol.refuse_taken(attempt.target, attempt.file)
    attempt.protocol.begin(attempt)


def publish(
    attempt: Attempt,
    ranks: Sequence[Mapping[str, Any]],
    sidecars: Mapping[str, bytes],
    manifest_fields: Mapping[str, Any],
    visibility_timeout: float = 0.0,
    unseen: Collection[int] = (),
) -> int:
    """Commit an attempt. When this returns, the checkpoint is complete and durable.

    Args:
        attempt: the attempt passed to `begin`
        ranks: what each rank wrote: `{"rank", "files": [{"name", "size", ...}]}`, each file fsynced by its writer
        sidecars: small files that only the coordinator writes, such as `.metadata`
        manifest_fields: additional plain values for the manifest, such as the format
        visibility_timeout: seconds to wait for files of other ranks to become visible here, and for a manifest whose
            creation was not confirmed
        unseen: ranks whose files cannot be seen from here; their word is taken for them

    Returns:
        The number of files in the checkpoint.

    Raises:
        CheckpointExistsError: the target name was taken concurrently; the target stays untouched
        CheckpointFencedError: another run took over the folder
        CheckpointSaveError: a file has the wrong size, the folder of the run vanished, or it is unknown whether the
            manifest was created; in that case the next start decides by what is on disk
        OSError: from the file system. Nothing is visible then, unless rolling back the last step failed too, which is
            logged as a warning.
    """
    protocol, storage, staging, files = (
        attempt.protocol,
        attempt.protocol.storage,
        attempt.staging,
        list[dict[str, Any]](),
    )
    names = [entry["name"] for rank in ranks if rank["rank"] not in unseen for entry in rank["files"]]
    sizes = storage.sizes(staging, names)
    for rank in ranks:
        for entry in rank["files"]:
            size = entry["size"] if rank["rank"] in unseen else sizes[entry["name"]]
            if size != entry["size"]:
                path = os.path.join(staging, entry["name"])
                if rank["rank"]:
                    _wait_for_size(storage, path, entry["size"], visibility_timeout)
                size = storage.size(path)  # some stores list what was so a moment ago
            if size != entry["size"]:
                raise CheckpointSaveError(
                    f"{entry['name']} has {size} bytes on disk and its writer reported {entry['size']}; not committed."
                )
            files.append(dict(entry))
    if attempt.file:
        protocol.commit_file(attempt)
        return 1
    for name, data in sidecars.items():
        storage.write_new(os.path.join(staging, name), data)
        files.append({"name": name, "size": len(data), "crc32": zlib.crc32(data)})
    content = {
        "version": VERSION,
        "attempt": attempt.token,
        "world_size": len(ranks),
        "created": storage.outside.date(),
        "files": files,
        **manifest_fields,
        **protocol.manifest_fields(attempt, ranks, sidecars),
    }
    manifest = encode_manifest(content)
    storage.write_new(os.path.join(staging, protocol.draft), manifest)
    storage.sync_folder(staging)
    if attempt.owner:  # as late as possible, because the run may have been suspended until now
        check_owner(storage, os.path.dirname(attempt.target), attempt.owner)
    protocol.commit(attempt, manifest, visibility_timeout)
    return len(files) + 1


def is_over(attempt: Attempt) -> bool:
    """Whether an attempt was already committed or abandoned. Raises CheckpointError when that cannot be read.

    Called after this rank has written its files.
    """
    return not attempt.protocol.storage.is_folder(attempt.staging) or attempt.protocol.is_committed(attempt)


def abandon(attempt: Attempt) -> None:
    """Remove the files of a failed attempt. Errors are only logged: the error of the save matters more."""
    attempt.protocol.abandon(attempt)


def _wait_for_size(storage: Storage, path: str, size: int, seconds: float) -> None:
    """Wait for another rank's file to become visible with its full size, unless the process that had it is dead."""
    seconds = seconds if storage.shows_late else 0.0
    with contextlib.suppress(CheckpointTimeoutError):  # the caller reports the size it finds
        wait_visible(lambda: storage.size(path) == size, path, seconds, storage)
