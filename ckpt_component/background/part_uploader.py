"""The uploader of another host: it sends the files of its host into what the leading rank's host has begun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..core.commit.commit import new_attempt
from ..core.commit.copying import copy_part
from ..core.commit.fencing import check_owner, read_owner
from ..core.commit.host_parts import part_of
from ..core.commit.manifest import data_folder, encode_manifest, read_manifest
from ..core.commit.manifest_commit import attempts_in
from ..core.commit.names import MANIFEST
from ..core.commit.part_notes import Beat, PartNote, called_manifest, is_called, note_path, read_note, write_note
from ..core.commit.protocol import Attempt
from ..core.commit.scan import Scan, scan_steps
from ..core.formats.verification import verify_part
from ..core.outside import Latch
from ..core.storage.files import local_files
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from .run_watch import RunWatch
from .upload_policy import UploadPolicy
from .uploading import Uploading

_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.5, 5.0
#: How often the local folder is looked at.
_LOOK_SECONDS = 0.5


class PartUploader(Uploading):
    """Sends the files of one host. It learns of checkpoints from the local folder, and what to do from the target.

    Args:
        policy: what to upload, and where to
        run: the run that makes the checkpoints
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
        #: Tokens of the attempts whose steps the target was seen to have.
        self._uploaded = set[str]()
        #: Steps of other attempts, the newest first; when to look for them in the target, and after which pause then.
        self._pending: dict[str, int] = {}
        self._look_at, self._pause = 0.0, _FIRST_LOOK_SECONDS
        #: When the folders of checkpoints in the local one have changed.
        self._seen = dict[str, float]()
        #: When to look, once the run has ended, whether anything is left to do.
        self._end_at = 0.0
        #: Whether the run was seen to own the target.
        self._owned = False

    def _next(self, local: Scan, *, ended: bool) -> int | None:
        pending = {token: step for token, step in self._attempts(local).items() if token not in self._uploaded}
        if pending != self._pending:
            self._pending, self._look_at, self._pause = pending, 0.0, _FIRST_LOOK_SECONDS
        if not pending or self._outside.now() < self._look_at:
            return None
        self._look_at = self._outside.now() + self._pause
        self._pause = min(1.5 * self._pause, _LONGEST_LOOK_SECONDS)
        for token, step in pending.items() if self._owns_target() else ():
            if read_manifest(self._storage, self._path(self._policy.target, step)) is not None:
                self._uploaded.add(token)
                self._end_at = 0.0
            elif token != _attempt_in(local, step):
                self._adopt(step, token)
            elif self._is_wanted(step, local):
                return step
        return None

    def _attempts(self, local: Scan) -> dict[str, int]:
        """The tokens of the attempts that this host has files of, the newest step first, with their steps."""
        found = dict[str, int]()
        for name in self._local.names(self._policy.source):
            if (step := self._policy.names.step_of(name)) is not None:
                found |= dict.fromkeys(attempts_in(self._local, os.path.join(self._policy.source, name)), step)
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def _adopt(self, step: int, token: str) -> None:
        """Take over the manifest of an attempt that the target waits for, if its save could not put it on this host."""
        folder = self._path(self._policy.source, step)
        try:
            own = read_manifest(self._local, folder)
        except CheckpointUnreadableError:
            raise  # it may be whole
        except CheckpointCorruptError:
            own = None
        if own is not None and own["attempt"] == token:
            return  # its files are not here
        manifest = called_manifest(new_attempt(self._storage, self._path(self._policy.target, step), token))
        if manifest is not None and self._policy.takes(manifest, step):
            self._local.write_over(os.path.join(folder, MANIFEST), encode_manifest(manifest))

    def _is_wanted(self, step: int, local: Scan) -> bool:
        """Whether the host that commits has begun with a step, and waits for the files of this one."""
        attempt = self._attempt(step, local)
        note = read_note(self._storage, note_path(attempt, local.manifests[step], self._policy.host))
        if note is not None and note.attempt == attempt.token:
            return False
        # After the note, which is deleted after the call: if this host has been waited for, there is none.
        return is_called(attempt)

    def _rest(self, local: Scan, changed: Latch, *, ended: bool) -> bool:
        if self._has_changed():
            return True
        if ended and self._outside.now() >= self._end_at:
            self._end_at = self._outside.now() + _LONGEST_LOOK_SECONDS
            target = scan_steps(self._storage, self._policy.target, self._policy.names)
            if self._policy.next_step(local, target, ended=True) is None:
                return False
        while True:
            self._outside.sleep(_LOOK_SECONDS)
            if (
                self._has_changed()
                or self._run.ended.is_set
                or (self._pending and self._outside.now() >= self._look_at)
            ):
                return True

    def _has_changed(self) -> bool:
        """Whether the local folder has other checkpoints than at the last call, or more of one. Reads nothing."""
        before, self._seen = self._seen, {}
        for name in self._local.names(self._policy.source):
            if self._policy.names.step_of(name) is not None:
                with contextlib.suppress(FileNotFoundError):  # the step has just been deleted
                    self._seen[name] = self._local.modified(os.path.join(self._policy.source, name))
        return self._seen != before

    def _owns_target(self) -> bool:
        """Whether the run has taken the target. Raises CheckpointFencedError if another run has since."""
        policy = self._policy
        if self._owned:
            check_owner(self._storage, policy.target, policy.run)
        else:
            owner = read_owner(self._storage, policy.target)
            self._owned = owner is not None and owner.token == policy.run
        return self._owned

    def _attempt(self, step: int, local: Scan) -> Attempt:
        return new_attempt(self._storage, self._path(self._policy.target, step), local.manifests[step]["attempt"])

    def _send(self, step: int, local: Scan) -> None:
        policy, manifest, attempt = self._policy, local.manifests[step], self._attempt(step, local)
        source, part = self._path(policy.source, step), part_of(manifest, policy.host)
        path, folder = note_path(attempt, manifest, policy.host), data_folder(self._local, source, part)
        began, started = self._outside.date(), self._outside.now()
        self._report({"began": step})
        beat = Beat(attempt, path)
        try:
            with beat:

                def pace(nbytes: int) -> None:
                    self._throttle.wait(nbytes)
                    beat.moved()

                copy_part(self._local, source, part, attempt, pace, self._sent.sharing(folder))
                self._verify(attempt, part)
        except (CheckpointError, OSError, ValueError) as error:
            if not is_called(attempt):
                return  # it was given up for a newer one
            write_note(self._storage, path, PartNote(error=str(error)))
            raise
        sent = sum(entry["size"] for entry in part["files"]) - self._sent.reused
        write_note(self._storage, path, PartNote(attempt=attempt.token, sent=sent, reused=self._sent.reused))
        self._sent.sent(folder, [entry["name"] for entry in part["files"]], attempt.staging)
        self._look_at, self._pause = 0.0, _FIRST_LOOK_SECONDS
        seconds, lag = round(self._outside.now() - started, 6), local.committed[-1] - step
        figures = {"bytes": sent, "reused": self._sent.reused, "seconds": seconds}
        self._report({"sent": step, **figures})
        about = {"time": round(began, 6), "step": step, "outcome": "sent", "path": attempt.target, "host": policy.host}
        self._record({**about, **figures, "lag_steps": lag})

    def _verify(self, attempt: Attempt, part: Mapping[str, Any]) -> None:
        """Read back what the host has sent, as nobody else will; an object is whole."""
        if local_files(self._storage) is None:
            return
        try:
            verify_part(self._storage, attempt.staging, part)
        except CheckpointUnreadableError:
            raise
        except CheckpointCorruptError:
            for entry in part["files"]:  # the next try sends them again
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(os.path.join(attempt.staging, entry["name"]))
            raise


def _attempt_in(local: Scan, step: int) -> str:
    """The token of the attempt whose manifest this host has; empty: it has none."""
    return str(local.manifests[step]["attempt"]) if step in local.manifests else ""
