"""Copy a checkpoint as a save writes it: into a staging folder, verified, and committed as a whole.

A copy that is cut off leaves the same kind of debris as a save that is, which `cleanup.sweep` deletes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..progress import Progress, no_progress
from .commit import abandon, begin, publish
from .files import FileStorage
from .liveness import AttemptLock
from .manifest import check_files, data_folder
from .names import Attempt, new_token
from .safe_open import open_regular, read_failure
from .space import refuse_without_room

_MAX_THREADS = 4
#: Bytes to copy between two reports of the progress, and before their writeback starts.
_STEP_BYTES = 64 << 20
#: Values of a manifest that belong to one commit; the copy has its own.
_OF_COMMIT = frozenset({"attempt", "at", "files", "version"})


def copy_checkpoint(
    fs: FileStorage,
    source: str,
    manifest: Mapping[str, Any],
    target: str,
    before_commit: Callable[[str], None],
    progress: Progress = no_progress,
) -> None:
    """Copy a checkpoint. When this returns, the copy is complete and durable; after an error there is none.

    Args:
        fs: the file system of both.
        source: folder of the checkpoint.
        manifest: its manifest.
        target: path of the copy.
        before_commit: called last before the copy becomes visible, with the folder of its files; an exception stops it.
        progress: follows the bytes.

    Raises:
        CheckpointCorruptError: the source is damaged.
        CheckpointExistsError: the target exists.
        CheckpointStorageFullError: there is not enough space.
        OSError: from the file system.
    """
    folder, files = data_folder(fs, source, manifest), manifest["files"]
    check_files(fs, folder, manifest)
    attempt = Attempt(target, new_token(), by_rename=fs.atomic_rename)
    nbytes = sum(entry["size"] for entry in files)
    refuse_without_room(fs, target, nbytes, 0)
    begin(fs, attempt)
    lock = AttemptLock(fs, attempt)
    try:
        with progress(f"copying {os.path.basename(source)}", nbytes) as advance:
            _copy_files(fs, folder, attempt.staging, files, advance)
        before_commit(attempt.staging)
        fields = {name: value for name, value in manifest.items() if name not in _OF_COMMIT}
        publish(fs, attempt, [{"rank": 0, "files": files}], {}, fields)
    except BaseException:
        abandon(fs, attempt)
        raise
    finally:
        lock.close()


def same_content(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two manifests are of copies of one checkpoint: equal but for what belongs to the commit of each."""
    names = (one.keys() | other.keys()) - _OF_COMMIT | {"files"}
    return all(one.get(name) == other.get(name) for name in names)


def _copy_files(
    fs: FileStorage, source: str, target: str, files: Sequence[Mapping[str, Any]], advance: Callable[[int], None]
) -> None:
    """Copy files, each durable when the next one starts on its thread."""
    stopped = threading.Event()

    def copy(entry: Mapping[str, Any]) -> None:
        name, size = entry["name"], entry["size"]
        try:
            reading = open_regular(os.path.join(source, name))
        except OSError as error:
            raise read_failure(os.path.join(source, name), error) from error
        try:
            writing = fs.create(os.path.join(target, name))
            try:
                for offset in range(0, size, _STEP_BYTES):
                    if stopped.is_set():
                        return
                    length = min(_STEP_BYTES, size - offset)
                    fs.copy(writing, reading, offset, length)
                    fs.start_writeback(writing, offset, length)
                    advance(length)
                fs.sync(writing)
            finally:
                fs.close(writing)
        finally:
            os.close(reading)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="ckpt-copy") as pool:
        try:
            for _ in pool.map(copy, files):
                pass
        except BaseException:
            stopped.set()  # the others end before the pool does
            raise
