"""Wait for the files of other hosts in an attempt that this process commits, and believe only what is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointUnreadableError
from .host_parts import hosts_of, part_of
from .part_notes import PartNote, is_note, note_path, read_note
from .protocol import Attempt

#: The beat of a host that has no note.
_NONE = -1
#: By then this host sees what another one has made; NFS clients remember sizes for some seconds.
_SEEN_SECONDS = 20.0
#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


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
    storage, outside = attempt.protocol.storage, attempt.protocol.storage.outside
    waiting = [_AwaitedPart(attempt, manifest, host) for host in sorted(hosts_of(manifest)) if host != own]
    if not waiting:
        return []
    done, pause = list[PartNote](), _FIRST_PAUSE
    while waiting:
        if any([part.has_changed() for part in waiting]):
            pause = _FIRST_PAUSE
        said = [part for part in waiting if part.note.attempt == attempt.token]
        sizes = storage.sizes(attempt.staging, [name for part in said for name in part.sizes]) if said else {}
        for part in said:
            if part.is_there(sizes, check):
                done.append(part.note)
                waiting.remove(part)
        for part in waiting:
            part.refuse_silence(sizes, silent_seconds)
        if waiting:
            outside.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    # The call first: it is the last in the order of names.
    for entry in sorted(filter(is_note, storage.names(attempt.staging)), reverse=True):
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(os.path.join(attempt.staging, entry))
    return done


class _AwaitedPart:
    """The files of another host, which an attempt waits for.

    Attributes:
        note: what the host has said last
        sizes: of its files, by name
    """

    def __init__(self, attempt: Attempt, manifest: Mapping[str, Any], host: str) -> None:
        self._storage = attempt.protocol.storage
        self._path = note_path(attempt, manifest, host)
        self._part = part_of(manifest, host)
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

    def is_there(self, sizes: Mapping[str, int | None], check: Callable[[Mapping[str, Any]], None]) -> bool:
        """Whether the files are there, with their sizes. Raises OSError if `check` says that one is damaged."""
        if self._wrong(sizes):
            return False
        try:
            check(self._part)
        except CheckpointUnreadableError as error:
            raise OSError(str(error)) from error
        except CheckpointCorruptError as error:
            raise self._disbelieve(str(error)) from error
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
