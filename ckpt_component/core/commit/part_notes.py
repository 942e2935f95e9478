"""How the hosts that copy one checkpoint together agree: by notes in the folder of the attempt.

The process that commits the attempt leaves a call for the parts of the others, and the manifest, which a save may not
have put on each of them. While a host copies, its note changes every few seconds; at the end it says that the files are
durable. It is believed only when the files are there. Before the commit the call and the notes are deleted. All of it
is on disk, so the next process continues where one was killed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..storage.new_names import NEW_PREFIX
from ..storage.storage import Storage
from .host_parts import hosts_of
from .manifest import MAX_BYTES, decode_manifest, encode_manifest
from .protocol import Attempt

logger = logging.getLogger("ckpt_component.storage")

_PREFIX = ".ckpt-part."
_CALL = f"{_PREFIX}call"
_MANIFEST = f"{_PREFIX}all"
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
    """Durably say that the hosts are to copy their files of a checkpoint into an attempt."""
    attempt.protocol.storage.write_over(os.path.join(attempt.staging, _MANIFEST), encode_manifest(manifest))
    attempt.protocol.storage.write_over(os.path.join(attempt.staging, _CALL), b"{}")


def is_called(attempt: Attempt) -> bool:
    """Whether an attempt waits for the files of the hosts. Reads the call, as a network file system caches names."""
    try:
        attempt.protocol.storage.read(os.path.join(attempt.staging, _CALL), _MAX_BYTES)
    except FileNotFoundError:
        return False
    return True


def called_manifest(attempt: Attempt) -> dict[str, Any] | None:
    """The manifest of the checkpoint whose files an attempt waits for; None: it waits for none.

    Raises:
        CheckpointCorruptError: it is damaged
        OSError: from the storage
    """
    path = os.path.join(attempt.staging, _MANIFEST)
    try:
        return decode_manifest(attempt.protocol.storage.read(path, MAX_BYTES), path) if is_called(attempt) else None
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
                if not is_called(self._attempt):
                    self._lost = True
                    return
                write_note(self._storage, self._path, PartNote(beat))
            except OSError as error:
                logger.info("the note %s could not be changed: %s", self._path, error)
