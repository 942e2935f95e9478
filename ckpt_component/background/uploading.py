"""`Uploading`: what all processes of the uploads do, whichever files they send: one checkpoint after the other."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fcntl import LOCK_EX
from functools import partial
from typing import Any, cast

from ..core.commit.liveness import try_lock
from ..core.commit.manifest import part_of, read_manifest
from ..core.commit.names import OWNER
from ..core.commit.scan import Scan, scan_steps
from ..core.outside import Latch
from ..core.storage.files import FileStorage
from ..core.storage.locate import storage_at
from ..core.storage.storage import Storage
from ..core.writing.range_writer import Throttle
from ..errors import CheckpointError, CheckpointFencedError
from ..events import EventFile
from .run_watch import RunWatch
from .sent_files import SentFiles
from .upload_policy import UploadPolicy

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
        locked: int | None = None
        is_alone, pause = False, _FIRST_PAUSE_SECONDS
        try:
            while True:
                changed = self._run.changed  # before the look: the end sets it, too
                ended = self._run.ended.is_set
                step: int | None = None
                try:
                    if not is_alone:  # an error is that of a folder that is gone, which the next save makes
                        locked, is_alone = self._lock_source(), True
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
            if locked is not None:
                self._local.close_folder(locked)

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

    def _lock_source(self) -> int | None:
        """Wait until the uploads of an earlier run have ended: when this run first saves, or after `finish_seconds`."""
        fd, began, is_shown = self._local.open_folder(self._policy.source), self._outside.now(), False
        while (locked := try_lock(self._local, fd, LOCK_EX, os.path.join(self._policy.source, OWNER))) is False:
            if self._outside.now() - began > _SHOWN_SECONDS and not is_shown:
                is_shown = True
                text = "waiting for the uploads of an earlier run from {}, which end when this run saves"
                print(text.format(self._policy.source), file=sys.stderr)
            self._outside.sleep(_LOOK_SECONDS)
        if locked is None:
            self._local.close_folder(fd)
        return fd if locked else None

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
