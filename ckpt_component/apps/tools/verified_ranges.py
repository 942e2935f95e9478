"""What a verification has found intact, in a small file, so that one that was cut off can continue."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...catalogue.verification import Item
from ...storage.file_system import file_system
from ...storage.names import MANIFEST

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 5.0
_MAX_BYTES = 1 << 30


def state_path(checkpoint: str) -> str:
    """Where the state of a checkpoint's verification is, unless the user names another file."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(checkpoint)).hexdigest()[:16]
    return os.path.join(cache, "ckpt_component", f"verify-{name}.json")


class VerifiedRanges:
    """The intact ranges of a checkpoint's files. Thread-safe.

    They count only for the manifest, and for the size and the time of change of a file, with which they were verified.

    Args:
        path: the state's file; it is written every few seconds.
        checkpoint: the checkpoint.
        folder: the folder of its files.
        files: their names.
        resume: start with what the file says; else with nothing.
    """

    def __init__(self, path: str, checkpoint: str, folder: str, files: Iterable[str], *, resume: bool) -> None:
        self._fs = file_system(durable=False)
        self._path = path
        self._folder = folder
        self._manifest = _crc_of(os.path.join(checkpoint, MANIFEST))
        self._signatures = {name: _signature(folder, name) for name in files}  # from before they are read
        self._ranges: dict[str, list[list[int]]] = self._read() if resume else {}
        self._fresh: list[Item] = []
        self._lock = threading.Lock()
        self._saved_at = time.monotonic()
        self._writable = True

    def __contains__(self, item: Item) -> bool:
        ranges = self._ranges.get(item.file, ())
        number = bisect_right(ranges, [item.offset, 1 << 63]) - 1
        return number >= 0 and item.end <= ranges[number][1]

    def add(self, item: Item) -> None:
        """An item is intact."""
        with self._lock:
            self._fresh.append(item)
            if self._writable and time.monotonic() - self._saved_at > _SAVE_SECONDS:
                self._save()

    def save(self) -> None:
        """Write the state, if any of it is new."""
        with self._lock:
            if self._writable and self._fresh:
                self._save()

    def delete(self) -> None:
        """The verification is complete."""
        if os.path.lexists(self._path):
            self._fs.unlink(self._path)

    def _save(self) -> None:
        for item in self._fresh:
            self._ranges.setdefault(item.file, []).append([item.offset, item.end])
        self._fresh.clear()
        for name, ranges in self._ranges.items():
            merged: list[list[int]] = []
            for begin, end in sorted(ranges):
                if merged and begin <= merged[-1][1]:
                    merged[-1][1] = max(merged[-1][1], end)
                else:
                    merged.append([begin, end])
            self._ranges[name] = merged
        files = {name: [*self._signatures[name], ranges] for name, ranges in self._ranges.items()}
        content = {"manifest_crc32": self._manifest, "folder": self._folder, "files": files}
        try:
            self._fs.make_folders(os.path.dirname(self._path))
            self._fs.write_over(self._path, json.dumps(content).encode())
        except OSError as error:
            self._writable = False
            logger.warning("%s cannot be written (%s); a verification that is cut off begins again", self._path, error)
        self._saved_at = time.monotonic()

    def _read(self) -> dict[str, list[list[int]]]:
        try:
            content: Any = json.loads(self._fs.read(self._path, _MAX_BYTES))
            if (content["manifest_crc32"], content["folder"]) != (self._manifest, self._folder):
                logger.warning("%s is of another checkpoint, or this one has changed; verifying all of it", self._path)
                return {}
            return {
                name: [[int(begin), int(end)] for begin, end in ranges]
                for name, (size, changed, ranges) in content["files"].items()
                if self._signatures.get(name) == [size, changed]
            }
        except FileNotFoundError:
            logger.info("%s does not exist; verifying all", self._path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be used (%s); verifying all", self._path, error)
        return {}


def _signature(folder: str, name: str) -> list[int]:
    """What changes when a file does."""
    try:
        status = os.stat(os.path.join(folder, name))
    except FileNotFoundError:
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def _crc_of(path: str) -> int:
    """The CRC of a manifest; 0 without one."""
    try:
        return zlib.crc32(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return 0
