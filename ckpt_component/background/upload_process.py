"""The process that uploads the checkpoints of a run. It outlives the run, for a bounded time.

The run sends a frame when there is a new checkpoint, and hangs up when it ends. What to upload follows from the
contents of the two folders, so the process may be killed at any time, and a later one continues the upload.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from fcntl import LOCK_EX
from typing import Any

from ..core.commit.cleanup import discard
from ..core.commit.commit import abandon, new_attempt
from ..core.commit.copying import Continued, copy_checkpoint
from ..core.commit.fencing import FencingToken, Owner, read_owner
from ..core.commit.liveness import try_lock
from ..core.commit.manifest import data_folder
from ..core.commit.names import OWNER
from ..core.commit.protocol import Attempt
from ..core.commit.scan import Scan, repair_pointer, scan_steps
from ..core.formats.verification import verify_files
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..core.storage.files import FileStorage, local_files
from ..core.storage.locate import file_storage, storage_at
from ..core.writing.range_writer import Throttle
from ..errors import CheckpointError, CheckpointFencedError
from ..events import EventFile
from .sent_files import SentFiles
from .upload_policy import UploadPolicy

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_LOOK_SECONDS = 0.5


def main() -> None:
    """Upload until the run has ended and all is there, or `finish_seconds` later. The job is an `UploadPolicy`.

    Each message is one of: `remote`, the newest step that is in the target; `began`, a step whose upload begins;
    `uploaded`, with `bytes` and `seconds`; `failed`, with the `error`; `fenced`: another run has taken over.
    """
    serve(_upload, on_orphan="finish")


def _upload(job: dict[str, Any], parent: Channel) -> None:
    logging.disable(logging.WARNING)  # the run logs what matters
    policy = UploadPolicy.of(job)
    run = RunWatch(policy)

    def report(message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the run has ended
            parent.send(message)

    threading.Thread(target=run.watch, args=(parent, report), name="ckpt-run-watch", daemon=True).start()
    try:
        Uploader(policy, run, report).run()
    except CheckpointFencedError as error:
        report({"fenced": str(error)})
    except (CheckpointError, OSError) as error:
        report({"failed": None, "error": str(error)})


class RunWatch:
    """Watches the run that this process belongs to.

    Args:
        policy: what is uploaded

    Attributes:
        changed: set when there may be more to upload
        ended: set when the run has ended
        newest: the newest step that the run has reported
    """

    def __init__(self, policy: UploadPolicy) -> None:
        self._policy = policy
        self._files = FileStorage()
        self.changed, self.ended = threading.Event(), threading.Event()
        self.newest = 0

    def watch(self, parent: Channel, report: Callable[[dict[str, Any]], None]) -> None:
        """Listen to the run; end this process when its time is over, or another run has taken over the local folder."""
        try:
            self._watch(parent, report)
        finally:
            os._exit(0)  # as if it was killed, whatever the storage is doing

    def _watch(self, parent: Channel, report: Callable[[dict[str, Any]], None]) -> None:
        deadline = float("inf")
        known = {self._policy.run, self._owner()[0]}
        while time.monotonic() < deadline:
            if self.ended.is_set():
                time.sleep(_LOOK_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    frame = parent.receive(time.monotonic() + _LOOK_SECONDS)
                    if frame is None:
                        deadline = time.monotonic() + self._policy.finish_seconds
                        self.ended.set()
                    else:
                        self.newest = frame[0]["newest"] or self.newest
                    self.changed.set()
            token, owner = self._owner()
            if token and token not in known:
                report({"fenced": f"Another run took over {self._policy.source} ({owner})."})
                return

    def _owner(self) -> tuple[str, Owner | None]:
        """The token of the owner of the local folder, and the owner; none while it cannot be read."""
        try:
            owner = read_owner(self._files, self._policy.source)
        except OSError:  # the uploads report what is wrong with the folder
            owner = None
        return ("", None) if owner is None else (owner.token, owner)


class Uploader:
    """Uploads checkpoints, one after the other.

    Args:
        policy: what to upload, and where to
        run: the run that makes them
        report: sends a message to the run
    """

    def __init__(self, policy: UploadPolicy, run: RunWatch, report: Callable[[dict[str, Any]], None]) -> None:
        self._policy = policy
        self._run = run
        self._report = report
        self._local = file_storage(process="upload")
        self._storage = storage_at(
            policy.target,
            durable=policy.durable,
            atomic_rename=policy.atomic_rename,
            options=policy.options,
            process="upload",
        )
        self._ownership = FencingToken(self._storage, policy.target, policy.names, policy.run)
        self._throttle = Throttle(policy.max_bytes_per_second)
        #: The contents of the target, scanned once and updated here, because no other process may write there.
        self._remote: Scan | None = None
        self._sent = SentFiles(self._local, self._storage)
        #: The upload that was cut off last.
        self._unfinished: Attempt | None = None

    def run(self) -> None:
        """Upload until the run has ended and nothing is left to do.

        Raises:
            CheckpointFencedError: another run has taken over the target
        """
        locked, pause = self._lock_source(), _FIRST_PAUSE_SECONDS
        try:
            while True:
                ended = self._run.ended.is_set()
                self._run.changed.clear()
                step: int | None = None
                try:
                    local = scan_steps(self._local, self._policy.source, self._policy.names)
                    step = self._next(local, ended)
                    if step is not None:
                        self._upload(step, local)
                        pause = _FIRST_PAUSE_SECONDS
                    elif ended:
                        return
                    else:
                        self._run.changed.wait()
                except CheckpointFencedError:
                    raise
                except (CheckpointError, OSError, ValueError) as error:
                    self._remote = None
                    if step is not None and not self._local.is_folder(self._path(self._policy.source, step)):
                        continue  # the run has deleted it, because it keeps newer ones
                    self._report({"failed": step, "error": str(error)})
                    if pause == _FIRST_PAUSE_SECONDS:
                        self._record({"time": time.time(), "step": step, "outcome": "failed", "error": str(error)})
                    self._run.ended.wait(pause) if not ended else time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            if locked is not None:
                self._local.close_folder(locked)

    def _lock_source(self) -> int | None:
        """Wait until the process of an earlier run, which goes on uploading, has ended; it does when this run saves."""
        fd = self._local.open_folder(self._policy.source)
        while (locked := try_lock(self._local, fd, LOCK_EX, os.path.join(self._policy.source, OWNER))) is False:
            time.sleep(_LOOK_SECONDS)
        if locked is None:
            self._local.close_folder(fd)
        return fd if locked else None

    def _next(self, local: Scan, ended: bool) -> int | None:
        return self._policy.next_step(local, self._scan_target(), ended=ended)

    def _scan_target(self) -> Scan:
        if self._remote is None:
            self._remote = scan_steps(self._storage, self._policy.target, self._policy.names)
            self._report({"remote": max(self._remote.committed, default=None)})
        return self._remote

    def _upload(self, step: int, local: Scan) -> None:
        policy, storage, manifest = self._policy, self._storage, local.manifests[step]
        source, target = self._path(policy.source, step), self._path(policy.target, step)
        attempt = new_attempt(storage, target, manifest["attempt"])
        if self._unfinished is not None and self._unfinished != attempt:
            abandon(self._unfinished)
        self._unfinished = attempt
        self._report({"began": step})
        began, started = time.time(), time.monotonic()

        def before_commit(staging: str, kept: Collection[str]) -> None:
            # After a power cut a file may have its size and not its bytes; an object is whole.
            if kept and local_files(storage) is not None:
                verify_files(storage, staging, manifest)

        share = self._sent.sharing(data_folder(self._local, source, manifest))
        continued = Continued(manifest["attempt"], self._ownership, self._throttle.wait, share)
        copy_checkpoint(self._local, source, manifest, storage, target, before_commit, continued=continued)
        self._unfinished = None
        names = [entry["name"] for entry in manifest["files"]]
        self._sent.sent(data_folder(self._local, source, manifest), names, attempt.protocol.files_of(attempt))
        figures = {
            "step": step,
            "bytes": sum(entry["size"] for entry in manifest["files"]) - self._sent.reused,
            "reused": self._sent.reused,
            "seconds": round(time.monotonic() - started, 6),
        }
        self._tidy(step, local)
        self._report({"uploaded": step, **figures})
        lag = max(local.committed[-1], self._run.newest) - step
        self._record({"time": round(began, 6), "outcome": "uploaded", "path": target, **figures, "lag_steps": lag})

    def _record(self, event: dict[str, Any]) -> None:
        """Record an upload, or the first of several failures, beside the other events of the run."""
        if self._policy.events:
            about = {"event": "upload", "run": self._policy.run, "rank": 0}
            EventFile(self._policy.source, 0).append([{**about, **event}])

    def _tidy(self, step: int, local: Scan) -> None:
        """Set the pointer of the target to its newest checkpoint, and delete what it no longer keeps."""
        policy, remote = self._policy, self._scan_target()
        remote.committed = sorted({*remote.committed, step})
        remote.manifests[step], remote.metrics[step] = local.manifests[step], local.metrics[step]
        repair_pointer(self._storage, policy.target, policy.names, remote.committed)
        for old in policy.to_delete(remote):
            if discard(self._storage, self._path(policy.target, old)):
                remote.committed.remove(old)

    def _path(self, root: str, step: int) -> str:
        return os.path.join(root, self._policy.names.folder(step))
