"""Which local files the target has already, so that an upload sends a file that checkpoints share once."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..core.storage.files import FileStorage
from ..core.storage.storage import Held, Storage

logger = logging.getLogger(__name__)

#: Smaller files are sent each time.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class _SentFile:
    """A local file and the target's, both held: so the local one's identity cannot become another file's."""

    local: Held
    remote: Held


class SentFiles:
    """The files of the checkpoint that was uploaded last.

    Args:
        local: storage of the local folder
        remote: storage of the target

    Attributes:
        reused: bytes that the last upload did not send
    """

    def __init__(self, local: FileStorage, remote: Storage) -> None:
        self._local = local
        self._remote = remote
        self._files: dict[tuple[int, int], _SentFile] = {}
        self.reused = 0

    def sharing(self, folder: str) -> Callable[[str, str], bool]:
        """For the upload of a checkpoint's folder: a function that shares a file with the last upload.

        Returns:
            A function of the file's name and its new path, which returns whether the target had the file.
        """
        self.reused = 0

        def share(name: str, path: str) -> bool:
            sent = self._files.get(self._local.identity(os.path.join(folder, name)))
            if sent is None:
                return False
            try:
                self._remote.share(sent.remote, path)
            except FileNotFoundError:  # another process has deleted it there
                return False
            self.reused += self._local.size(os.path.join(folder, name)) or 0
            return True

        return share

    def sent(self, folder: str, names: Iterable[str], target: str) -> None:
        """Remember the files of an uploaded checkpoint, in place of those before.

        Args:
            folder: the local folder of the files
            names: their names
            target: the folder of the uploaded ones
        """
        files: dict[tuple[int, int], _SentFile] = {}
        try:
            for name in names:
                path = os.path.join(folder, name)
                if (self._local.size(path) or 0) < _LEAST_BYTES:
                    continue
                remote = self._remote.hold(os.path.join(target, name))
                local = None if remote is None else self._local.hold(path)
                if local is None or remote is None:  # an object that is too large to be copied
                    continue
                file = _SentFile(local, remote)
                weakref.finalize(file, self._local.release, local)
                weakref.finalize(file, self._remote.release, remote)
                files[self._local.identity(f"/proc/self/fd/{local}")] = file
        except OSError as error:  # the run may have deleted it, because it keeps newer ones
            logger.info("the next upload sends all of its files: %s", error)
        self._files = files
