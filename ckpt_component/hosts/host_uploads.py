"""Each host sends the files of its folder to the permanent one: how those that copy one checkpoint together agree.

The process of the leading rank's host begins an attempt, leaves a call for the files of the others, waits for them, and
commits. The call is the manifest, which a save may not have put on each host. While the process of another host copies,
its note in the folder of the attempt changes every few seconds; at the end it says that the files are durable. It is
believed only when the files are there. Before the commit the call and the notes are deleted. All of it is on disk, so
the next process continues where one was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..background.upload_policy import UploadPolicy
from ..background.upload_process import upload
from ..background.uploading import Copied, Uploader, Uploading
from ..core.commit.commit import new_attempt
from ..core.commit.copying import Continued, copy_part
from ..core.commit.fencing import check_owner, read_owner
from ..core.commit.manifest import (
    MAX_BYTES,
    data_folder,
    decode_manifest,
    encode_manifest,
    hosts_of,
    part_of,
    read_manifest,
)
from ..core.commit.names import MANIFEST
from ..core.commit.protocol import Attempt
from ..core.commit.protocols import attempts_in
from ..core.commit.scan import Scan, scan_steps
from ..core.outside import OUTSIDE, Latch, Outside
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..core.storage.files import local_files
from ..core.storage.new_names import NEW_PREFIX
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from ..formats.verification import small_files, verify_part

logger = logging.getLogger("ckpt_component.storage")

_PREFIX = ".ckpt-part."
_CALL = f"{_PREFIX}call"
_MAX_BYTES = 1 << 20
#: How often the note of a host that copies changes.
BEAT_SECONDS = 5.0
#: For how long without a byte a copy counts as work: a large part that is on its way to a bucket.
_STUCK_SECONDS = 600.0


@dataclass(frozen=True)
class PartNote:
    """What a host says of its part of a copy.

    Attributes:
        beat: changes while it copies
        attempt: token of the attempt that has its files; empty: it is not done
        sent: bytes that it sent
        reused: bytes that the target had
        error: why it cannot continue now; empty: it can
    """

    beat: int = 0
    attempt: str = ""
    sent: int = 0
    reused: int = 0
    error: str = ""


def is_note(name: str) -> bool:
    """Whether a file in the folder of an attempt is a note, or was to become one."""
    return name.removeprefix(NEW_PREFIX).startswith(_PREFIX)


def call_for_parts(attempt: Attempt, manifest: Mapping[str, Any]) -> None:
    """Durably say that the hosts are to copy their files of a checkpoint into an attempt, and which these are."""
    attempt.protocol.storage.write_over(os.path.join(attempt.staging, _CALL), encode_manifest(manifest))


def call_of(attempt: Attempt) -> bytes | None:
    """The manifest of the checkpoint whose files an attempt waits for, as it is stored; None: it waits for none.

    Reads the call, as a network file system caches names. Raises OSError.
    """
    try:
        return attempt.protocol.storage.read(os.path.join(attempt.staging, _CALL), MAX_BYTES)
    except FileNotFoundError:
        return None


def note_path(attempt: Attempt, manifest: Mapping[str, Any], host: str) -> str:
    """Where the note of a host is; by its number, as the name of a host may have any characters."""
    return os.path.join(attempt.staging, f"{_PREFIX}{sorted(hosts_of(manifest)).index(host)}")


def read_note(storage: Storage, path: str) -> PartNote | None:
    """What a note says; None: there is none, or it is not whole yet."""
    try:
        note = PartNote(**json.loads(storage.read(path, _MAX_BYTES)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return note if all(type(value) is type(vars(PartNote())[name]) for name, value in vars(note).items()) else None


def write_note(storage: Storage, path: str, note: PartNote) -> None:
    """Durably write or replace a note."""
    storage.write_over(path, json.dumps(vars(note)).encode())


@contextlib.contextmanager
def at_work(attempt: Attempt, path: str, pace: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Say in the note of a host that it is at work, in a thread, within a context.

    Args:
        attempt: the attempt, which has called
        path: path of the note
        pace: called with the number of bytes before they are copied

    Yields:
        The same. It also raises FileNotFoundError if the attempt was given up.

    Raises:
        OSError: the note cannot be written
    """
    storage, outside = attempt.protocol.storage, attempt.protocol.storage.outside
    over, is_lost, moved_at = outside.latch(), outside.latch(), outside.now()

    def change_note() -> None:
        for beat in itertools.count(1):
            if over.wait(BEAT_SECONDS):
                return
            if outside.now() - moved_at > _STUCK_SECONDS:
                continue
            try:
                if call_of(attempt) is None:
                    is_lost.set()
                    return
                write_note(storage, path, PartNote(beat))
            except OSError as error:
                logger.info("the note %s could not be changed: %s", path, error)

    def moving(nbytes: int) -> None:
        nonlocal moved_at
        pace(nbytes)
        moved_at = outside.now()
        if is_lost.is_set:
            raise FileNotFoundError(f"{attempt.staging} was given up by the host that began it")

    write_note(storage, path, PartNote())
    thread = outside.start("ckpt-part-beat", change_note)
    try:
        yield moving
    finally:
        over.set()
        thread.join(_STUCK_SECONDS)


#: The beat of a host that has no note.
_NONE = -1
#: By then this host sees what another one has made; NFS clients remember sizes for some seconds.
_SEEN_SECONDS = 20.0
#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


def wait_for_hosts(attempt: Attempt, manifest: Mapping[str, Any], own: str, silent_seconds: float) -> Copied:
    """Wait until all hosts but this one, `own`, have copied their files; then delete the notes.

    Raises:
        OSError: a host was silent for so long, says that it cannot continue, or that it is done although a file is not
            there or damaged; such a note is deleted, so that the host looks after its files again. Or from the storage.
    """
    storage, staging, hosts = attempt.protocol.storage, attempt.staging, hosts_of(manifest)
    parts = [_AwaitedPart(attempt, manifest, host) for host in sorted(hosts) if host != own]
    waiting, pause = parts, _FIRST_PAUSE
    while waiting:
        if any([part.has_changed() for part in waiting]):
            pause = _FIRST_PAUSE
        names = [name for part in waiting if part.note.attempt == attempt.token for name in hosts[part.host]]
        sizes = storage.sizes(staging, names) if names else {}
        waiting = [part for part in waiting if not part.is_there(sizes, silent_seconds)]
        if waiting:
            storage.outside.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    # The call first: it is the last in the order of names.
    for entry in sorted(filter(is_note, storage.names(staging)), reverse=True) if hosts else ():
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(os.path.join(staging, entry))
    return Copied(sum(part.note.sent for part in parts), sum(part.note.reused for part in parts))


class _AwaitedPart:
    """The files of another host, which an attempt waits for.

    Attributes:
        host: the other one
        note: what the host has said last
    """

    def __init__(self, attempt: Attempt, manifest: Mapping[str, Any], host: str) -> None:
        self._storage, self._attempt, self.host = attempt.protocol.storage, attempt, host
        self._path, self._part = note_path(attempt, manifest, host), part_of(manifest, host)
        self._what = f"its files of {os.path.basename(attempt.target)}"
        #: When that changed last.
        self._since = self._storage.outside.now()
        self.note = PartNote(beat=_NONE)

    def has_changed(self) -> bool:
        """Look at the note. Raises OSError if the host says that it cannot continue."""
        note = read_note(self._storage, self._path) or PartNote(beat=_NONE)
        if note.error:
            raise OSError(f"{self.host} cannot send {self._what}: {note.error}")
        if note == self.note:
            return False
        self.note, self._since = note, self._storage.outside.now()
        return True

    def is_there(self, sizes: Mapping[str, int | None], seconds: float) -> bool:
        """Whether the files are there, with their sizes.

        Raises:
            OSError: the note was the same for so long, or says that files are there that are not, or one that verifies
                others is damaged
        """
        silent = self._storage.outside.now() - self._since
        if self.note.attempt != self._attempt.token:
            if silent > seconds:
                what = "begun to send" if self.note.beat == _NONE else "gone on sending"
                raise TimeoutError(f"{self.host} has not {what} {self._what} for {seconds:g} s")
            return False
        wrong = [entry for entry in self._part["files"] if sizes[entry["name"]] != entry["size"]]
        if wrong and silent > min(seconds, _SEEN_SECONDS):
            name, size = wrong[0]["name"], wrong[0]["size"]
            raise self._disbelieve(f"{name} has {sizes[name] or 0} bytes instead of {size}")
        for damage in small_files(self._storage, self._attempt.staging, self._part) if not wrong else ():
            if isinstance(damage.error, CheckpointUnreadableError):
                raise OSError(str(damage.error)) from damage.error
            self._storage.unlink(os.path.join(self._attempt.staging, damage.file))
            raise self._disbelieve(str(damage.error)) from damage.error
        return not wrong

    def _disbelieve(self, why: str) -> OSError:
        """Delete the note, so that the host looks after its files again."""
        with contextlib.suppress(FileNotFoundError):
            self._storage.unlink(self._path)
        return OSError(f"{self.host} says that it has sent {self._what}: {why}")


_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.5, 5.0
#: How often the local folder is looked at.
_LOOK_SECONDS = 0.5


class PartUploader(Uploading):
    """Sends the files of one host. It learns of checkpoints from the local folder, and what to do from the target.

    Args:
        arguments: those of `Uploading`
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Tokens of the attempts whose steps the target was seen to have.
        self._uploaded = set[str]()
        #: Steps of other attempts here, the newest first; when to look for them in the target, and after which pause.
        self._pending: dict[str, int] = {}
        self._look_at, self._pause = 0.0, _FIRST_LOOK_SECONDS
        #: When the folders of checkpoints in the local one have changed.
        self._seen = dict[str, float]()
        #: When to look, once the run has ended, whether anything is left to do.
        self._end_at = 0.0
        #: Whether the run was seen to own the target.
        self._owned = False

    def _next(self, local: Scan, *, ended: bool) -> int | None:
        newest_first = sorted(self._folders().items(), key=lambda each: -each[1])
        attempts = {token: step for path, step in newest_first for token in attempts_in(self._local, path)}
        pending = {token: step for token, step in attempts.items() if token not in self._uploaded}
        if pending != self._pending:
            self._pending, self._look_at, self._pause = pending, 0.0, _FIRST_LOOK_SECONDS
        if not pending or self._outside.now() < self._look_at:
            return None
        self._look_at = self._outside.now() + self._pause
        self._pause = min(1.5 * self._pause, _LONGEST_LOOK_SECONDS)
        for token, step in pending.items() if self._owns_target() else ():
            attempt = self._attempt(step, token)
            if read_manifest(self._storage, attempt.target) is not None:
                self._uploaded.add(token)
                self._end_at = 0.0
            elif token != local.manifests.get(step, {}).get("attempt"):
                self._adopt(step, attempt)
            elif self._is_wanted(attempt, local.manifests[step]):
                return step
        return None

    def _folders(self) -> dict[str, int]:
        """The folders of checkpoints in the local one, with their steps."""
        source, step_of = self._policy.source, self._policy.names.step_of
        found = {os.path.join(source, name): step_of(name) for name in self._local.names(source)}
        return {path: step for path, step in found.items() if step is not None}

    def _adopt(self, step: int, attempt: Attempt) -> None:
        """Take over the manifest of an attempt that the target waits for, if its save could not put it on this host."""
        path, call = os.path.join(self._path(self._policy.source, step), MANIFEST), call_of(attempt)
        if call is None or not self._policy.takes(decode_manifest(call, f"the call for {path}"), step):
            return
        if self._local.size(path) is None or self._local.read(path, MAX_BYTES) != call:  # else its files are not here
            self._local.write_over(path, call)

    def _is_wanted(self, attempt: Attempt, manifest: Mapping[str, Any]) -> bool:
        """Whether the host that commits has begun with a step, and waits for the files of this one."""
        note = read_note(self._storage, note_path(attempt, manifest, self._policy.host))
        # The call after the note, which is deleted after it: if this host has been waited for, there is none.
        return (note is None or note.attempt != attempt.token) and call_of(attempt) is not None

    def _rest(self, local: Scan, changed: Latch, *, ended: bool) -> bool:
        while not self._has_changed():
            if ended and self._outside.now() >= self._end_at:
                self._end_at = self._outside.now() + _LONGEST_LOOK_SECONDS
                target = scan_steps(self._storage, self._policy.target, self._policy.names)
                if self._policy.next_step(local, target, ended=True) is None:
                    return False
            self._outside.sleep(_LOOK_SECONDS)
            if self._run.ended.is_set or (self._pending and self._outside.now() >= self._look_at):
                return True
        return True

    def _has_changed(self) -> bool:
        """Whether the local folder has other checkpoints than at the last call, or more of one. Reads nothing."""
        before, self._seen = self._seen, {}
        for path in self._folders():
            with contextlib.suppress(FileNotFoundError):  # the step has just been deleted
                self._seen[path] = self._local.modified(path)
        return self._seen != before

    def _owns_target(self) -> bool:
        """Whether the run has taken the target. Raises CheckpointFencedError if another run has since."""
        policy = self._policy
        if self._owned:
            check_owner(self._storage, policy.target, policy.run)
        elif (owner := read_owner(self._storage, policy.target)) is not None:
            self._owned = owner.token == policy.run
        return self._owned

    def _attempt(self, step: int, token: str) -> Attempt:
        return new_attempt(self._storage, self._path(self._policy.target, step), token)

    def _send(self, step: int, local: Scan) -> None:
        policy, manifest = self._policy, local.manifests[step]
        attempt = self._attempt(step, manifest["attempt"])
        source, part = self._path(policy.source, step), part_of(manifest, policy.host)
        path, folder = note_path(attempt, manifest, policy.host), data_folder(self._local, source, part)
        began, started = self._outside.date(), self._outside.now()
        self._report({"began": step})
        try:
            with at_work(attempt, path, self._throttle.wait) as pace:
                copy_part(self._local, source, part, attempt, pace, self._sent.sharing(folder))
                if local_files(self._storage) is not None:  # an object is whole
                    self._verify(attempt, part)
        except (CheckpointError, OSError, ValueError) as error:
            if call_of(attempt) is None:
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
        """Read back what the host has sent, as no other process will."""
        try:
            verify_part(self._storage, attempt.staging, part)
        except CheckpointUnreadableError:
            raise
        except CheckpointCorruptError:
            for entry in part["files"]:  # the next try sends them again
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(os.path.join(attempt.staging, entry["name"]))
            raise


class LeadingUploader(Uploader):
    """Uploads checkpoints whose files are in the folders of several hosts: its own files, and commits them all."""

    def continued(self, own: Continued, manifest: Mapping[str, Any]) -> Continued:
        """See the base class: the others are called."""
        if not hosts_of(manifest):
            return own
        return replace(own, begun=lambda attempt: call_for_parts(attempt, manifest), stays=is_note)

    def wait_for_others(self, attempt: Attempt, manifest: Mapping[str, Any]) -> Copied:
        """See the base class."""
        return wait_for_hosts(attempt, manifest, self._policy.host, self._policy.silent_seconds)


def main(outside: Outside = OUTSIDE) -> None:
    """Entry point of the process that uploads from the folder of a host; see that of `upload_process`."""
    serve(_upload, on_orphan="finish", outside=outside)


def _upload(job: dict[str, Any], parent: Channel) -> None:
    upload(LeadingUploader if UploadPolicy.of(job).leads else PartUploader, job, parent)
