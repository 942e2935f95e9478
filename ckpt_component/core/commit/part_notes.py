"""How the hosts that copy one checkpoint together agree: by notes in the folder of the attempt.

The process that commits the attempt leaves a call for the parts of the others. While a host copies, its note changes
every few seconds; at the end it says that the files are durable. It is believed only when the files are there. Before
the commit the call and the notes are deleted. All of it is on disk, so a process that was killed goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointCorruptError
from ..storage.new_names import NEW_PREFIX
from ..storage.storage import Storage
from .host_parts import hosts_of, part_of
from .protocol import Attempt

logger = logging.getLogger("ckpt_component.storage")

_PREFIX = ".ckpt-part."
_CALL = f"{_PREFIX}call"
_MAX_BYTES = 1 << 20
#: How often the note of a host that copies changes.
BEAT_SECONDS = 5.0
#: For how long without a byte a copy counts as work: a large part that is on its way to a bucket.
_STUCK_SECONDS = 600.0
#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


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


def call_for_parts(attempt: Attempt) -> None:
    """Durably say that the hosts are to copy their files into an attempt."""
    attempt.protocol.storage.write_over(os.path.join(attempt.staging, _CALL), b"{}")


def is_called(attempt: Attempt) -> bool:
    """Whether an attempt waits for the files of the hosts."""
    return attempt.protocol.storage.size(os.path.join(attempt.staging, _CALL)) is not None


def note_path(attempt: Attempt, manifest: Mapping[str, Any], host: str) -> str:
    """Where the note of a host is; by its number, as the name of a host may have any characters."""
    return os.path.join(attempt.staging, f"{_PREFIX}{sorted(hosts_of(manifest)).index(host)}")


def read_note(storage: Storage, path: str) -> PartNote | None:
    """What a note says; None: there is none, or it is not whole yet."""
    try:
        return PartNote(**json.loads(storage.read(path, _MAX_BYTES)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


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
        self._over = self._storage.clock.latch()
        #: Whether the attempt was given up.
        self._lost = False
        self._moved = self._storage.clock.now()
        write_note(self._storage, path, PartNote())
        self._thread = self._storage.clock.start("ckpt-part-beat", self._run)

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_STUCK_SECONDS)

    def moved(self) -> None:
        """Bytes are about to be copied. Raises FileNotFoundError if the attempt was given up."""
        self._moved = self._storage.clock.now()
        if self._lost:
            raise FileNotFoundError(f"{self._attempt.staging} was given up by the host that began it")

    def _run(self) -> None:
        clock = self._storage.clock
        for beat in itertools.count(1):
            if self._over.wait(BEAT_SECONDS):
                return
            if clock.now() - self._moved > _STUCK_SECONDS:
                continue
            try:
                if not is_called(self._attempt):
                    self._lost = True
                    return
                write_note(self._storage, self._path, PartNote(beat))
            except OSError as error:
                logger.info("the note %s could not be changed: %s", self._path, error)


def wait_for_parts(
    attempt: Attempt,
    manifest: Mapping[str, Any],
    own: str,
    silent_seconds: float,
    check: Callable[[Mapping[str, Any]], None],
) -> list[PartNote]:
    """Wait until all other hosts have copied their files; then delete the notes.

    Args:
        attempt: the attempt
        manifest: of the checkpoint
        own: the host of this process
        silent_seconds: how long a host may be silent
        check: called with the part of a host whose files are there with their sizes; raises CheckpointCorruptError if
            one is damaged

    Returns:
        What the hosts said; nothing if the checkpoint is in a single folder.

    Raises:
        OSError: a host was silent, says that it cannot go on, or that it is done although a file is not there or
            damaged; such a note is deleted, so that the host looks after its files again. Or from the storage.
    """
    waiting = [host for host in sorted(hosts_of(manifest)) if host != own]
    if not waiting:
        return []
    storage, clock, name = attempt.protocol.storage, attempt.protocol.storage.clock, os.path.basename(attempt.target)
    heard: dict[str, tuple[PartNote | None, float]] = dict.fromkeys(waiting, (None, clock.now()))
    done, pause = list[PartNote](), _FIRST_PAUSE
    while waiting:
        for host in [*waiting]:
            path, part = note_path(attempt, manifest, host), part_of(manifest, host)
            note = read_note(storage, path)
            if note != heard[host][0]:
                heard[host], pause = (note, clock.now()), _FIRST_PAUSE
            if note is not None and note.error:
                raise OSError(f"{host} cannot send its files of {name}: {note.error}")
            is_done = note is not None and note.attempt == attempt.token
            wrong = _wrong(attempt, part) if is_done else ""
            if note is not None and is_done and not wrong:
                try:
                    check(part)
                except CheckpointCorruptError as error:
                    storage.unlink(path)
                    raise OSError(f"{host} says that it has sent its files of {name}: {error}") from error
                done.append(note)
                waiting.remove(host)
            elif clock.now() - heard[host][1] > silent_seconds:
                if wrong:
                    storage.unlink(path)
                    raise TimeoutError(f"{host} says that it has sent its files of {name}, and {wrong}")
                what = "begun to send" if note is None else "gone on sending"
                raise TimeoutError(f"{host} has not {what} its files of {name} for {silent_seconds:g} s")
        if waiting:
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    # The call first: it is the last in the order of names.
    for entry in sorted(filter(is_note, storage.names(attempt.staging)), reverse=True):
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(os.path.join(attempt.staging, entry))
    return done


def _wrong(attempt: Attempt, part: Mapping[str, Any]) -> str:
    """Which file of a part is not there with its size, for a text; empty if all are."""
    sizes = attempt.protocol.storage.sizes(attempt.staging, [entry["name"] for entry in part["files"]])
    for entry in part["files"]:
        if sizes[entry["name"]] != entry["size"]:
            return f"{entry['name']} has {sizes[entry['name']] or 0} bytes instead of {entry['size']}"
    return ""
