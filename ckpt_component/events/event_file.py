"""The files of a run's events: one per rank, appended (in a bucket: replaced by a longer one), a JSON object per line.

They describe saves and are no part of any, so they are not synced: a power cut may lose the last lines. A process that
is killed while it writes leaves a torn line, which readers skip.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.storage.files import FileStorage
from ..core.storage.locate import absolute, storage_at
from ..core.storage.storage import Storage

logger = logging.getLogger(__name__)

#: The folder of the event files, in the folder of the checkpoints.
FOLDER = "events"
#: Larger than any file of events: a million steps have 120 MB.
_MAX_BYTES = 1 << 30
_NAME = re.compile(r"rank-\d{5,}\.jsonl")


class EventFile:
    """The events of one rank of a run. A restart of the run appends to the same file.

    Args:
        root: the folder of the checkpoints
        rank: this rank
        fs: file system operations; the default is not the one of saves, whose operations the fault tests count
    """

    def __init__(self, root: str, rank: int, fs: Storage | None = None) -> None:
        self._root = root
        self.path = os.path.join(root, FOLDER, f"rank-{rank:05d}.jsonl")
        self._fs: Storage = FileStorage(durable=False) if fs is None else fs
        self._failed = False
        #: Whether the file may end with a torn line, of an earlier run or a failed write.
        self._torn = True
        #: Whether this run has written to it.
        self._exists = False

    def append(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per event. The first failure is logged as a warning; later events are tried all the same."""
        data = "".join(f"{json.dumps(event, separators=(',', ':'), default=str)}\n" for event in events).encode()
        try:
            self._append(data)
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s); saves continue without these events", self.path, error)
            self._failed = self._torn = True

    def _append(self, data: bytes) -> None:
        folder = os.path.dirname(self.path)
        if not self._fs.is_folder(folder):
            if self._exists or not self._fs.is_folder(self._root):
                return  # it vanished under the run, and is not made again
            with contextlib.suppress(FileExistsError):  # another rank was faster
                self._fs.make_folder(folder)
        if self._torn and self._fs.size(self.path):
            data = b"\n" + data
        self._fs.append(self.path, data)
        self._torn, self._exists = False, True


def read_events(root: str | os.PathLike[str], fs: Storage | None = None) -> Iterator[dict[str, Any]]:
    """The events of all runs that saved in a folder, rank by rank, each rank's in the order of writing.

    Lines that are no events, such as one that a killed process left half written, are skipped.

    Args:
        root: the folder of the checkpoints; one without events yields nothing
        fs: its storage; None: that of the path, without options

    Raises:
        OSError: an event file cannot be read
    """
    for value in read_values(root, fs):
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            yield value


def read_values(root: str | os.PathLike[str], fs: Storage | None = None) -> Iterator[Any]:
    """The lines of the event files as JSON values, whatever they are; None for one that is nested too deeply.

    Args:
        root: as for `read_events`
        fs: as for `read_events`

    Raises:
        OSError: an event file cannot be read
    """
    fs, folder = fs or storage_at(root), os.path.join(absolute(root), FOLDER)
    for name in fs.names(folder):
        if _NAME.fullmatch(name):
            yield from _read_file(fs, os.path.join(folder, name))


def _read_file(fs: Storage, path: str) -> Iterator[Any]:
    for number, line in enumerate(fs.read(path, _MAX_BYTES).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except RecursionError:
            yield None
        except ValueError:
            logger.info("%s: line %d is torn; a process may have been killed while it wrote it", path, number)
