"""Copy a checkpoint as a save writes it: into a staging folder, verified, and committed as a whole.

One process makes the copy and commits it. If the files are in the folders of several hosts, it copies those of its own
host, and a process of each other host copies a part. A copy that is cut off leaves the same kind of debris as a save
that is, which `Unfinished.sweep` deletes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..progress import Progress, no_progress
from ..storage.files import local_files
from ..storage.new_names import new_token
from ..storage.open_files import OpenFiles
from ..storage.safe_open import read_failure
from ..storage.space import refuse_without_room
from ..storage.storage import Storage
from .commit import abandon, begin, new_attempt, publish
from .fencing import FencingToken
from .liveness import AttemptLock
from .manifest import check_files, data_folder, part_of
from .protocol import Attempt

_MAX_THREADS = 4
#: Bytes to copy between two reports of the progress, and before their writeback starts.
_STEP_BYTES = 64 << 20
#: The same where the bytes go through memory, or at a bounded rate.
_SMALL_STEP_BYTES = 8 << 20
#: Values of a manifest that belong to one commit; the copy has its own.
_OF_COMMIT = frozenset({"attempt", "at", "files", "hosts", "version"})


def _no_share(name: str, path: str) -> bool:
    """The target has no file yet."""
    return False


def _alone(attempt: Attempt) -> None:
    """Nobody else copies files of the checkpoint."""


def _none(name: str) -> bool:
    """Nobody else has files there."""
    return False


@dataclass(frozen=True)
class Continued:
    """A copy that a later one with the same token continues, instead of beginning again.

    After an OSError its files stay.

    Attributes:
        token: identifies it; that of the attempt that made the source
        ownership: the run's claim to the root of the target, acquired before the copy and checked before its commit
        pace: called with the number of bytes before they are copied, to bound the rate
        share: called with a file's name and new path; makes it appear there and returns True if the target has its
            bytes already
        host: whose files these are, if the source is the folder of one host; the others copy theirs until
            `before_commit` has returned
        begun: called when there is a folder for the copy, before any file is copied
        stays: whether a file there, by its name, says something of the files of others, and stays
    """

    token: str
    ownership: FencingToken
    pace: Callable[[int], None]
    share: Callable[[str, str], bool] = _no_share
    host: str = ""
    begun: Callable[[Attempt], None] = _alone
    stays: Callable[[str], bool] = _none


def copy_checkpoint(
    source: Storage,
    path: str,
    manifest: Mapping[str, Any],
    storage: Storage,
    target: str,
    before_commit: Callable[[str, Collection[str]], None],
    progress: Progress = no_progress,
    continued: Continued | None = None,
) -> None:
    """Copy a checkpoint. When this returns, the copy is complete and durable; after an error there is none.

    Args:
        source: the storage of the checkpoint
        path: its folder
        manifest: its manifest
        storage: the storage of the copy
        target: path of the copy
        before_commit: called last before the copy becomes visible, with the folder of its files and the names of those
            that an earlier attempt had copied; an exception stops it
        progress: follows the bytes
        continued: for a copy that may be cut off often; None: it is made in one go

    Raises:
        CheckpointCorruptError: the source is damaged
        CheckpointExistsError: the target exists
        CheckpointFencedError: another run took over the root of the target
        CheckpointStorageFullError: there is not enough space
        OSError: from the storage
    """
    token, owner = new_token(storage.outside), ""
    if continued is not None:
        token, owner = continued.token, continued.ownership.token
    part = manifest if continued is None else part_of(manifest, continued.host)
    folder, files = data_folder(source, path, manifest), part["files"]
    check_files(source, folder, part)
    attempt = new_attempt(storage, target, token, owner)
    # Locked before the root is acquired, which deletes the files of dead attempts.
    again = continued is not None and storage.is_real_folder(attempt.staging)
    lock = AttemptLock(storage, attempt, owner) if again else None
    try:
        if continued is not None:
            continued.ownership.acquire()
        kept = list[str]()
        if lock is not None:
            if lock.held_by_others():
                raise BlockingIOError(errno.EAGAIN, "another process is copying to it", attempt.staging)
            names = {entry["name"] for entry in manifest["files"]}
            stays = _none if continued is None else continued.stays
            kept = _kept_files(attempt, files, lambda name: name in names or stays(name))
        missing = _missing(attempt, files, kept)
        if lock is None:
            begin(attempt)
            lock = AttemptLock(storage, attempt, owner)
        try:
            if continued is not None:
                continued.begun(attempt)
            pace, share = (None, _no_share) if continued is None else (continued.pace, continued.share)
            with progress(f"copying {os.path.basename(path)}", sum(entry["size"] for entry in missing)) as advance:
                _copy_files(source, folder, attempt, missing, advance, pace, share)
            before_commit(attempt.staging, kept)
            fields = {name: value for name, value in manifest.items() if name not in _OF_COMMIT}
            publish(attempt, [{"rank": 0, "files": manifest["files"]}], {}, fields)
        except BaseException as error:
            if continued is None or not isinstance(error, OSError):
                abandon(attempt)
            raise
    finally:
        if lock is not None:
            lock.close()


def copy_part(
    source: Storage,
    path: str,
    part: Mapping[str, Any],
    attempt: Attempt,
    pace: Callable[[int], None],
    share: Callable[[str, str], bool] = _no_share,
) -> None:
    """Copy the files of this host into an attempt that a process of another host has begun, and will commit.

    What is there continues from where it was; no file of another host is touched. When this returns, the files are
    durable.

    Args:
        source: the storage of the checkpoint
        path: its folder
        part: its manifest with the files of this host
        attempt: where they go
        pace: as for `Continued`
        share: as for `Continued`

    Raises:
        CheckpointCorruptError: the source is damaged
        CheckpointStorageFullError: there is not enough space
        OSError: from the storage
    """
    folder, files = data_folder(source, path, part), part["files"]
    check_files(source, folder, part)
    names = {entry["name"] for entry in files}
    missing = _missing(attempt, files, _kept_files(attempt, files, lambda name: name not in names))
    _copy_files(source, folder, attempt, missing, lambda nbytes: None, pace, share)
    attempt.protocol.storage.sync_folder(attempt.staging)


def same_content(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two manifests are of copies of one checkpoint: equal but for what belongs to the commit of each."""
    names = (one.keys() | other.keys()) - _OF_COMMIT | {"files"}
    return all(one.get(name) == other.get(name) for name in names)


def _kept_files(attempt: Attempt, files: Sequence[Mapping[str, Any]], is_kept: Callable[[str], bool]) -> list[str]:
    """Those of the files that an earlier attempt has copied, judged by their size.

    Those with another size are deleted, and so is what else is there, except what `is_kept`.
    """
    storage = attempt.protocol.storage
    sizes, kept = {entry["name"]: entry["size"] for entry in files}, []
    for name in storage.names(attempt.staging):
        path = os.path.join(attempt.staging, name)
        if name in sizes and storage.size(path) == sizes[name]:
            kept.append(name)
        elif name in sizes or not is_kept(name):
            storage.unlink(path)
    return kept


def _missing(
    attempt: Attempt, files: Sequence[Mapping[str, Any]], kept: Collection[str]
) -> Sequence[Mapping[str, Any]]:
    """The files that are to be copied, for which there is room."""
    missing = [entry for entry in files if entry["name"] not in kept]
    refuse_without_room(attempt.protocol.storage, attempt.target, sum(entry["size"] for entry in missing), 0)
    return missing


def _copy_files(
    source: Storage,
    folder: str,
    attempt: Attempt,
    files: Sequence[Mapping[str, Any]],
    advance: Callable[[int], None],
    pace: Callable[[int], None] | None,
    share: Callable[[str, str], bool],
) -> None:
    """Copy files, each durable when the next one starts on its thread; those that the target has are shared first."""
    storage, target = attempt.protocol.storage, attempt.staging
    unshared = list[Mapping[str, Any]]()
    for entry in files:
        if share(entry["name"], os.path.join(target, entry["name"])):
            advance(entry["size"])
        else:
            unshared.append(entry)
    stopped = storage.outside.latch()
    local = local_files(storage)

    def copy(entry: Mapping[str, Any]) -> None:
        name, size = entry["name"], entry["size"]
        # A bucket chooses the size of its parts by it; a file takes its space as it is copied.
        writing = storage.create(os.path.join(target, name), 0 if local is not None else size)
        try:
            for offset in range(0, size, step):
                if stopped.is_set:
                    return
                length = min(step, size - offset)
                if pace is not None:
                    pace(length)
                if local is not None and isinstance(opened, OpenFiles):
                    local.copy(writing, opened.descriptor(name), offset, length)
                else:
                    block = memoryview(bytearray(length))  # the storage may keep it until the sync
                    if not opened.fill(name, block, offset):
                        path = os.path.join(folder, name)
                        raise read_failure(path, OSError(errno.EIO, "it is too short", path))
                    storage.write(writing, [block], offset)
                storage.start_writeback(writing, offset, length)
                advance(length)
            storage.sync(writing)
        finally:
            storage.close(writing)

    with (
        source.open_files(folder) as opened,
        storage.outside.pool(min(_MAX_THREADS, os.cpu_count() or 1), "ckpt-copy") as pool,
    ):
        by_kernel = local is not None and isinstance(opened, OpenFiles)
        step = _STEP_BYTES if by_kernel and pace is None else _SMALL_STEP_BYTES
        try:
            for _ in pool.map(copy, unshared):
                pass
        except BaseException:
            stopped.set()  # the others end before the pool does
            raise
