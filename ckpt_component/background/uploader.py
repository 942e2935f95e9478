"""The uploader of the leading rank's host: it begins and commits each checkpoint of the target, and tidies up there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..core.commit.cleanup import Unfinished, discard
from ..core.commit.commit import abandon, new_attempt
from ..core.commit.copying import Continued, copy_checkpoint
from ..core.commit.fencing import FencingToken
from ..core.commit.manifest import data_folder, part_of
from ..core.commit.protocol import Attempt
from ..core.commit.scan import Scan, repair_pointer, scan_steps
from ..core.outside import Latch
from ..core.storage.files import local_files
from ..core.storage.storage import Storage
from ..formats.verification import verify_part
from .run_watch import RunWatch
from .upload_policy import UploadPolicy
from .uploading import Uploading


class Copied(NamedTuple):
    """Of the bytes of a copy, those that were sent, and those that the target had."""

    sent: int = 0
    reused: int = 0


class Uploader(Uploading):
    """Uploads checkpoints; of one in the folders of several hosts its own files, see `continued`.

    Args:
        policy: what to upload, and where to
        run: the run that makes them
        report: sends a message to the run
        storage_of: see `Uploading`
    """

    def __init__(
        self,
        policy: UploadPolicy,
        run: RunWatch,
        report: Callable[[dict[str, Any]], None],
        storage_of: Callable[[str], Storage] | None = None,
    ) -> None:
        super().__init__(policy, run, report, storage_of)
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
