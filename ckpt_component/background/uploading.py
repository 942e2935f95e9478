"""`Uploading`: what all processes of the uploads do, whichever files they send: one checkpoint after the other."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from ..core.commit.cleanup import Unfinished, discard
from ..core.commit.commit import abandon, new_attempt
from ..core.commit.copying import Continued, copy_checkpoint
from ..core.commit.fencing import FencingToken
from ..core.commit.liveness import FolderLock
from ..core.commit.manifest import data_folder, part_of, read_manifest
from ..core.commit.protocol import Attempt
from ..core.commit.scan import Scan, repair_pointer, scan_steps
from ..core.outside import Latch
from ..core.storage.files import FileStorage, local_files
from ..core.storage.locate import storage_at
from ..core.storage.storage import Held, Storage
from ..core.writing.range_writer import Throttle
from ..errors import CheckpointError, CheckpointFencedError
from ..events import EventFile
from ..formats.verification import verify_part
from .jobs import RunWatch
from .upload_policy import UploadPolicy

logger = logging.getLogger(__name__)

#: Smaller files are sent each time.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class _SentFile:
    """A local file and the target's, both held: so the local one's identity cannot become another file's."""

    local: Held
    remote: Held


class SentFiles:
    """The files of the checkpoint that was uploaded last.

    Args:
        local: storage of the local folder
        remote: storage of the target

    Attributes:
        reused: bytes that the last upload did not send
    """

    def __init__(self, local: FileStorage, remote: Storage) -> None:
        self._local = local
        self._remote = remote
        self._files: dict[tuple[int, int], _SentFile] = {}
        self.reused = 0

    def sharing(self, folder: str) -> Callable[[str, str], bool]:
        """For the upload of a checkpoint's folder: a function that shares a file with the last upload.

        Returns:
            A function of the file's name and its new path, which returns whether the target had the file.
        """
        self.reused = 0

        def share(name: str, path: str) -> bool:
            sent = self._files.get(self._local.identity(os.path.join(folder, name)))
            if sent is None:
                return False
            try:
                self._remote.share(sent.remote, path)
            except FileNotFoundError:  # another process has deleted it there
                return False
            self.reused += self._local.size(os.path.join(folder, name)) or 0
            return True

        return share

    def sent(self, folder: str, names: Iterable[str], target: str) -> None:
        """Remember the files of an uploaded checkpoint, in place of those before.

        Args:
            folder: the local folder of the files
            names: their names
            target: the folder of the uploaded ones
        """
        files: dict[tuple[int, int], _SentFile] = {}
        try:
            for name in names:
                path = os.path.join(folder, name)
                if (self._local.size(path) or 0) < _LEAST_BYTES:
                    continue
                remote = self._remote.hold(os.path.join(target, name))
                local = None if remote is None else self._local.hold(path)
                if local is None or remote is None:  # an object that is too large to be copied
                    continue
                file = _SentFile(local, remote)
                weakref.finalize(file, self._local.release, local)
                weakref.finalize(file, self._remote.release, remote)
                files[self._local.identity(f"/proc/self/fd/{local}")] = file
        except OSError as error:  # the run may have deleted it, because it keeps newer ones
            logger.info("the next upload sends all of its files: %s", error)
        self._files = files


_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
#: A shorter wait for an earlier run is not logged.
_SHOWN_SECONDS = 5.0


class Uploading(ABC):
    """Sends what is due until the run has ended and nothing is left to do.

    Args:
        policy: what to upload, and where to
        run: the run that makes the checkpoints
        report: sends a message to the run
        storage_of: returns the storage of an absolute path or URL, of the local folder that of files; None: files, and
            buckets by their scheme
    """

    def __init__(
        self,
        policy: UploadPolicy,
        run: RunWatch,
        report: Callable[[dict[str, Any]], None],
        storage_of: Callable[[str], Storage] | None = None,
    ) -> None:
        self._policy, self._run, self._report = policy, run, report
        self._local = cast(FileStorage, (storage_of or partial(storage_at, process="upload"))(policy.source))
        self._storage = (storage_of or partial(_target_of, policy))(policy.target)
        self._outside = self._local.outside
        self._throttle = Throttle(policy.max_bytes_per_second, self._outside)
        self._sent = SentFiles(self._local, self._storage)

    def run(self) -> None:
        """Send until the run has ended and nothing is left to do.

        Raises:
            CheckpointFencedError: another run has taken over the target
        """
        lock = FolderLock(self._local, self._policy.source)
        is_alone, pause = False, _FIRST_PAUSE_SECONDS
        try:
            while True:
                changed = self._run.changed  # before the look: the end sets it, too
                ended = self._run.ended.is_set
                step: int | None = None
                try:
                    if not is_alone:  # an error is that of a folder that is gone, which the next save makes
                        self._wait_for(lock)
                        is_alone = True
                    local = self._scan_source()
                    step = self._next(local, ended=ended)
                    if step is not None:
                        self._send(step, local)
                        pause = _FIRST_PAUSE_SECONDS
                    elif not self._rest(local, changed, ended=ended):
                        return
                except CheckpointFencedError:
                    raise
                except (CheckpointError, OSError, ValueError) as error:
                    self._forget()
                    if step is not None and not self._local.is_folder(self._path(self._policy.source, step)):
                        continue  # the run has deleted it, because it keeps newer ones
                    self._report({"failed": step, "error": str(error)})
                    if pause == _FIRST_PAUSE_SECONDS:
                        self._record(
                            {"time": self._outside.date(), "step": step, "outcome": "failed", "error": str(error)}
                        )
                    self._run.ended.wait(pause) if not ended else self._outside.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            lock.release()

    @abstractmethod
    def _next(self, local: Scan, *, ended: bool) -> int | None:
        """Which checkpoint of the local folder to send now; None: none."""

    @abstractmethod
    def _send(self, step: int, local: Scan) -> None:
        """Send a checkpoint."""

    @abstractmethod
    def _rest(self, local: Scan, changed: Latch, *, ended: bool) -> bool:
        """Wait until there may be something to send, as when this is set; returns False if there will not be."""

    def _forget(self) -> None:
        """After a failure: what was known of the target may be wrong."""

    def _wait_for(self, lock: FolderLock) -> None:
        """Wait until the uploads of an earlier run have ended: when this run first saves, or after `finish_seconds`."""
        began, is_shown = self._outside.now(), False
        while lock.take() is False:
            if self._outside.now() - began > _SHOWN_SECONDS and not is_shown:
                is_shown = True
                text = "waiting for the uploads of an earlier run from {}, which end when this run saves"
                print(text.format(self._policy.source), file=sys.stderr)
            self._outside.sleep(_LOOK_SECONDS)

    def _scan_source(self) -> Scan:
        """The checkpoints that this process has files of; committed are those that have all of its own."""
        policy, whole = self._policy, dict[str, Mapping[str, Any]]()
        for name in self._local.names(policy.source):
            if (step := policy.names.step_of(name)) is not None:
                with contextlib.suppress(CheckpointError):  # the scan says what is wrong with it
                    manifest = read_manifest(self._local, os.path.join(policy.source, name))
                    if manifest is not None and policy.takes(manifest, step):
                        whole[name] = manifest
        parts = {name: part_of(manifest, policy.host) for name, manifest in whole.items()}
        scan = scan_steps(self._local, policy.source, policy.names, parts)
        for step in scan.steps():
            if (name := policy.names.folder(step)) in whole:
                scan.manifests[step] = whole[name]
            else:
                scan.forget(step)
        return scan

    def _record(self, event: dict[str, Any]) -> None:
        """Record an upload, or the first of several failures, beside the other events of the run."""
        if self._policy.events:
            about = {"event": "upload", "run": self._policy.run, "rank": self._policy.rank}
            EventFile(self._policy.source, self._policy.rank).append([{**about, **event}])

    def _path(self, root: str, step: int) -> str:
        return os.path.join(root, self._policy.names.folder(step))


def _target_of(policy: UploadPolicy, path: str) -> Storage:
    settings: dict[str, Any] = {name: getattr(policy, name) for name in ("durable", "atomic_rename", "options")}
    return storage_at(path, process="upload", **settings)


class Copied(NamedTuple):
    """Of the bytes of a copy, those that were sent, and those that the target had."""

    sent: int = 0
    reused: int = 0


class Uploader(Uploading):
    """Uploads checkpoints; of one in the folders of several hosts its own files, see `continued`.

    Args:
        arguments: those of `Uploading`
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        policy = self._policy
        self._ownership = FencingToken(self._storage, policy.target, policy.names, policy.run)
        #: The contents of the target, scanned once and updated here, because no other process may commit there.
        self._remote: Scan | None = None
        #: The upload that was cut off last, and which of its files were verified.
        self._unfinished: Attempt | None = None
        self._verified = set[str]()
        #: Whether what dead processes left in the target was deleted.
        self._is_swept = False

    def _next(self, local: Scan, *, ended: bool) -> int | None:
        return self._policy.next_step(local, self._scan_target(), ended=ended)

    def _rest(self, local: Scan, changed: Latch, *, ended: bool) -> bool:
        return not ended and changed.wait(math.inf)  # the end of the run is a change

    def _forget(self) -> None:
        self._remote = None

    def _scan_target(self) -> Scan:
        if self._remote is None:
            self._remote = scan_steps(self._storage, self._policy.target, self._policy.names)
            self._report({"remote": max(self._remote.committed, default=None)})
        return self._remote

    def _send(self, step: int, local: Scan) -> None:
        policy, storage, manifest = self._policy, self._storage, local.manifests[step]
        source, target = self._path(policy.source, step), self._path(policy.target, step)
        part, attempt = part_of(manifest, policy.host), new_attempt(storage, target, manifest["attempt"])
        if self._unfinished != attempt:
            if self._unfinished is not None:
                abandon(self._unfinished)
            self._verified = set()
        self._unfinished = attempt
        self._report({"began": step})
        began, started = self._outside.date(), self._outside.now()
        others = Copied()

        def before_commit(staging: str, kept: Collection[str]) -> None:
            # After a power cut a file may have its size and not its bytes; an object is whole.
            if not self._verified.issuperset(kept) and local_files(storage) is not None:
                verify_part(storage, staging, part)
            self._verified |= {entry["name"] for entry in part["files"]}
            nonlocal others
            others = self.wait_for_others(attempt, manifest)

        share = self._sent.sharing(data_folder(self._local, source, part))
        own = Continued(manifest["attempt"], self._ownership, self._throttle.wait, share, policy.host)
        continued = self.continued(own, manifest)
        copy_checkpoint(self._local, source, manifest, storage, target, before_commit, continued=continued)
        self._unfinished = None
        names = [entry["name"] for entry in part["files"]]
        self._sent.sent(data_folder(self._local, source, part), names, attempt.protocol.files_of(attempt))
        sent = sum(entry["size"] for entry in part["files"]) - self._sent.reused
        figures = {
            "step": step,
            "bytes": sent + others.sent,
            "reused": self._sent.reused + others.reused,
            "seconds": round(self._outside.now() - started, 6),
        }
        self._tidy(step, local)
        self._report({"uploaded": step, **figures})
        lag = max(local.committed[-1], self._run.newest) - step
        self._record({"time": round(began, 6), "outcome": "uploaded", "path": target, **figures, "lag_steps": lag})

    def continued(self, own: Continued, manifest: Mapping[str, Any]) -> Continued:
        """How a checkpoint is copied, given how this host copies its files. Several hosts add to it."""
        return own

    def wait_for_others(self, attempt: Attempt, manifest: Mapping[str, Any]) -> Copied:
        """Wait for what other hosts copy. Raises OSError if one does not."""
        return Copied()

    def _tidy(self, step: int, local: Scan) -> None:
        """Set the pointer of the target to its newest checkpoint, and delete what it no longer keeps."""
        policy, remote = self._policy, self._scan_target()
        remote.committed = sorted({*remote.committed, step})
        remote.manifests[step], remote.metrics[step] = local.manifests[step], local.metrics[step]
        repair_pointer(self._storage, policy.target, policy.names, remote.committed)
        if not self._is_swept:  # no run restores there, which would have done it
            self._is_swept = True
            Unfinished(self._storage, policy.target, policy.names).sweep()
        for old in policy.to_delete(remote):
            if discard(self._storage, self._path(policy.target, old)):
                remote.committed.remove(old)
