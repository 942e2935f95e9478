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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..background.jobs import Follower, RunWatch
from ..background.upload_policy import UploadPolicy
from ..background.upload_process import upload
from ..background.uploading import Copied, Uploader, Uploading
from ..background.uploads import UploadChild
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
from ..core.storage.space import amount
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
        error: why it cannot go on now; empty: it can
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


class Beat:
    """Says in the note of a host that it is at work, in a thread, until the block ends.

    Args:
        attempt: the attempt, which has called
        path: path of the note

    Raises:
        OSError: the note cannot be written
    """

    def __init__(self, attempt: Attempt, path: str) -> None:
        self._storage, self._attempt, self._path = attempt.protocol.storage, attempt, path
        self._over = self._storage.outside.latch()
        #: Whether the attempt was given up.
        self._lost = False
        self._moved = self._storage.outside.now()
        write_note(self._storage, path, PartNote())
        self._thread = self._storage.outside.start("ckpt-part-beat", self._run)

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_STUCK_SECONDS)

    def moved(self) -> None:
        """Bytes are about to be copied. Raises FileNotFoundError if the attempt was given up."""
        self._moved = self._storage.outside.now()
        if self._lost:
            raise FileNotFoundError(f"{self._attempt.staging} was given up by the host that began it")

    def _run(self) -> None:
        outside = self._storage.outside
        for beat in itertools.count(1):
            if self._over.wait(BEAT_SECONDS):
                return
            if outside.now() - self._moved > _STUCK_SECONDS:
                continue
            try:
                if call_of(self._attempt) is None:
                    self._lost = True
                    return
                write_note(self._storage, self._path, PartNote(beat))
            except OSError as error:
                logger.info("the note %s could not be changed: %s", self._path, error)


#: The beat of a host that has no note.
_NONE = -1
#: By then this host sees what another one has made; NFS clients remember sizes for some seconds.
_SEEN_SECONDS = 20.0
#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


def wait_for_hosts(attempt: Attempt, manifest: Mapping[str, Any], own: str, silent_seconds: float) -> Copied:
    """Wait until all hosts but this one, `own`, have copied their files; then delete the notes.

    Raises:
        OSError: a host was silent for so long, says that it cannot go on, or that it is done although a file is not
            there or damaged; such a note is deleted, so that the host looks after its files again. Or from the storage.
    """
    storage, staging, hosts = attempt.protocol.storage, attempt.staging, sorted(hosts_of(manifest))
    waiting = [_AwaitedPart(attempt, manifest, host) for host in hosts if host != own]
    copied, pause = Copied(), _FIRST_PAUSE
    while waiting:
        if any([part.has_changed() for part in waiting]):
            pause = _FIRST_PAUSE
        said = [part for part in waiting if part.note.attempt == attempt.token]
        sizes = storage.sizes(staging, [name for part in said for name in part.sizes]) if said else {}
        for part in said:
            if part.is_there(sizes):
                copied = Copied(copied.sent + part.note.sent, copied.reused + part.note.reused)
                waiting.remove(part)
        for part in waiting:
            part.refuse_silence(sizes, silent_seconds)
        if waiting:
            storage.outside.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    # The call first: it is the last in the order of names.
    for entry in sorted(filter(is_note, storage.names(staging)), reverse=True) if hosts else ():
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(os.path.join(staging, entry))
    return copied


class _AwaitedPart:
    """The files of another host, which an attempt waits for.

    Attributes:
        note: what the host has said last
        sizes: of its files, by name
    """

    def __init__(self, attempt: Attempt, manifest: Mapping[str, Any], host: str) -> None:
        self._storage, self._staging = attempt.protocol.storage, attempt.staging
        self._path, self._part = note_path(attempt, manifest, host), part_of(manifest, host)
        self._host, self._what = host, f"its files of {os.path.basename(attempt.target)}"
        #: When that changed last.
        self._since = self._storage.outside.now()
        self.note = PartNote(beat=_NONE)
        self.sizes = {entry["name"]: entry["size"] for entry in self._part["files"]}

    def has_changed(self) -> bool:
        """Look at the note. Raises OSError if the host says that it cannot go on."""
        note = read_note(self._storage, self._path) or PartNote(beat=_NONE)
        if note.error:
            raise OSError(f"{self._host} cannot send {self._what}: {note.error}")
        if note == self.note:
            return False
        self.note, self._since = note, self._storage.outside.now()
        return True

    def is_there(self, sizes: Mapping[str, int | None]) -> bool:
        """Whether the files are there, with their sizes. Raises OSError if one that verifies others is damaged."""
        if self._wrong(sizes):
            return False
        for damage in small_files(self._storage, self._staging, self._part):
            if isinstance(damage.error, CheckpointUnreadableError):
                raise OSError(str(damage.error)) from damage.error
            self._storage.unlink(os.path.join(self._staging, damage.file))
            raise self._disbelieve(str(damage.error)) from damage.error
        return True

    def refuse_silence(self, sizes: Mapping[str, int | None], seconds: float) -> None:
        """Raise OSError if the note was the same for so long, or says that files are there that are not."""
        is_done = self.sizes.keys() <= sizes.keys()
        if self._storage.outside.now() - self._since <= (min(seconds, _SEEN_SECONDS) if is_done else seconds):
            return
        if is_done:
            raise self._disbelieve(self._wrong(sizes))
        what = "begun to send" if self.note.beat == _NONE else "gone on sending"
        raise TimeoutError(f"{self._host} has not {what} {self._what} for {seconds:g} s")

    def _disbelieve(self, why: str) -> OSError:
        """Delete the note, so that the host looks after its files again."""
        with contextlib.suppress(FileNotFoundError):
            self._storage.unlink(self._path)
        return OSError(f"{self._host} says that it has sent {self._what}: {why}")

    def _wrong(self, found: Mapping[str, int | None]) -> str:
        """Which file is not there with its size; empty if all are."""
        wrong = [(name, found[name] or 0, size) for name, size in self.sizes.items() if found[name] != size]
        return "" if not wrong else "{} has {} bytes instead of {}".format(*wrong[0])


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
        call = call_of(new_attempt(self._storage, self._path(self._policy.target, step), token))
        if call is not None and self._policy.takes(decode_manifest(call, f"the call for {folder}"), step):
            self._local.write_over(os.path.join(folder, MANIFEST), call)

    def _is_wanted(self, step: int, local: Scan) -> bool:
        """Whether the host that commits has begun with a step, and waits for the files of this one."""
        attempt = self._attempt(step, local)
        note = read_note(self._storage, note_path(attempt, local.manifests[step], self._policy.host))
        if note is not None and note.attempt == attempt.token:
            return False
        # After the note, which is deleted after the call: if this host has been waited for, there is none.
        return call_of(attempt) is not None

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


_AGAIN_SECONDS = 1.0


class HostUploads(Follower):
    """Owns the process of the uploads on the first rank of such a host. How far they are behind, the leader says.

    Args:
        policy: what to upload
        outside: of the run
    """

    def __init__(self, policy: UploadPolicy, outside: Outside = OUTSIDE) -> None:
        self._policy = policy
        self._failed = False
        self._child = UploadChild(policy, self._take, _AGAIN_SECONDS, outside)

    def start(self, step: int = 0) -> None:
        """Send what the leading host asks for, from now on; the run begins after `step`."""
        self._child.began(step)
        self._child.start()

    def end(self, *, finish: bool) -> None:
        """The run has ended: let uploads go on, for at most `finish_seconds`.

        Args:
            finish: wait for them
        """
        self._child.end(finish=finish)

    def _take(self, message: dict[str, Any]) -> None:
        host = self._policy.host
        if "sent" in message:
            self._failed, name = False, self._policy.names.folder(message["sent"])
            size, seconds = amount(message["bytes"]), message["seconds"]
            logger.info("%s: %s sent its files in %.1f s: %s, to %s", name, host, seconds, size, self._policy.target)
        elif "fenced" in message:
            logger.warning("uploads of %s have stopped: %s", host, message["fenced"])
        elif message.get("ended"):
            logger.warning(
                "the process of the uploads of %s ended with code %d; it is started again", host, message["ended"]
            )
        elif "failed" in message and not self._failed:
            self._failed = True
            text = "%s cannot send its files to %s, and tries again: %s"
            logger.warning(text, host, self._policy.target, message["error"])


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
