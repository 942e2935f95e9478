"""What a verification has found intact, in a small file, so that one that was cut off can continue."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from pathlib import Path

from ..core.commit.names import MANIFEST
from ..core.storage.storage import Storage
from ..formats.rank_index import StoredRange
from ..formats.verification import Inspection

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 5.0


class VerifiedItems:
    """The intact items of a checkpoint, in a file of the cache folder. Thread-safe.

    They count only as long as no file of the checkpoint has changed.

    Args:
        fs: the storage of the checkpoint
        inspection: the checkpoint, whose items have not been read yet
        resume: start with what the file says; else with nothing
    """

    def __init__(self, fs: Storage, inspection: Inspection, *, resume: bool) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        name = hashlib.sha256(os.fsencode(inspection.path)).hexdigest()[:16]
        self._path = cache / "ckpt_component" / f"verify-{name}.jsonl"
        self._checkpoint = inspection.path
        #: The file's first line.
        self._signature = f"{_signature(fs, inspection)}\n"
        self._known = self._read() if resume else set()
        self._fresh: list[StoredRange] = []
        self._lock = threading.RLock()
        self._saved_at = time.monotonic()

    def __contains__(self, item: StoredRange) -> bool:
        return (item.file, item.offset, item.length) in self._known

    def add(self, item: StoredRange) -> None:
        """An item is intact; the file is written every few seconds."""
        with self._lock:
            self._fresh.append(item)
            if time.monotonic() - self._saved_at > _SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        """Write what is new."""
        with self._lock:
            self._saved_at = time.monotonic()
            lines = [f"{json.dumps([item.file, item.offset, item.length])}\n" for item in self._fresh]
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if not self._known:
                    self._path.write_text(self._signature)
                with self._path.open("a") as file:
                    file.writelines(lines)
            except OSError as error:
                logger.warning("%s cannot be written (%s); once cut off, all is verified again", self._path, error)
                self._saved_at = math.inf  # not again
            self._known |= {(item.file, item.offset, item.length) for item in self._fresh}
            self._fresh.clear()

    def delete(self) -> None:
        """The verification is complete."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # such as in a home folder of another user, where there is none of ours
            logger.info("%s cannot be deleted: %s", self._path, error)

    def _read(self) -> set[tuple[str, int, int]]:
        try:
            with self._path.open() as lines:
                if next(lines, "") == self._signature:
                    return {tuple(json.loads(line)) for line in lines if line.endswith("]\n")}
            logger.warning("%s has changed since it was verified; verifying all of it", self._checkpoint)
        except FileNotFoundError:
            logger.info("no verification of %s was cut off; verifying all of it", self._checkpoint)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be used (%s); verifying all", self._path, error)
        return set()


def _signature(fs: Storage, inspection: Inspection) -> str:
    """What changes when a file of a checkpoint does."""
    files = [os.path.join(inspection.path, MANIFEST)]
    files += [os.path.join(inspection.folder, name) for name in sorted(inspection.sizes)]
    status = [(fs.size(file), fs.changed(file)) for file in files if fs.exists(file)]
    return hashlib.sha256(repr((files, status)).encode()).hexdigest()
