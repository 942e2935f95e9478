"""Which files a checkpointer's snapshots share: with the last checkpoint, or with others that have the same bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..outside import OUTSIDE
from ..state.flatten import FlatState
from ..state.paths import key_of
from ..state.structure import Structure
from ..state.unchanged_tensors import UnchangedTensors
from ..storage.storage import Storage
from .layout import Layout
from .unchanged_files import CommittedFile, FileBytes, Read, SharedFile, UnchangedFiles, find_hash, shared_files

logger = logging.getLogger("ckpt_component.image")

#: Looks for files with given bytes, by any number, in a storage; returns those that it has found and compared. With the
#: flag, only in folders of other runs that come before the own one, so that of two runs only one takes the other's.
Find = Callable[[Mapping[int, FileBytes], Storage, bool], Mapping[int, CommittedFile]]

#: In so many saves after a file was written.
_LOOKS = 3


class FileReuse:
    """Decides which files a checkpointer's snapshots share with the last committed one.

    The training thread calls `group`, `observe` and `look`; the save thread calls `settle` and `committed`.

    Args:
        unchanged: which tensors are expected to keep their values; None: no files are shared
        find: looks in other checkpoints for files that the last one does not have
        checksum: algorithm of the items' checksums
        in_memory: whether snapshots go to memory too, where what is not copied is shared by its open file
    """

    def __init__(
        self,
        unchanged: UnchangedTensors | None,
        find: Find = lambda wanted, storage, elsewhere: {},
        checksum: str = "",
        *,
        in_memory: bool = False,
    ) -> None:
        self._unchanged = unchanged
        self._in_memory = in_memory
        self._find = find
        self._checksum = checksum
        self._lock = OUTSIDE.lock()
        #: The files of the last committed checkpoint by key, and the marks of their tensors then.
        self._kept: dict[Any, CommittedFile] = {}
        self._marks: dict[Any, Sequence[Any]] = {}
        self._storage: Storage | None = None
        #: How often to look whether an earlier job has written the same file as this one, by key; for the save thread.
        self._own: dict[Any, int] = {}

    def _kept_in(self, storage: Storage | None) -> dict[Any, CommittedFile]:
        return self._kept if storage is self._storage else {}

    def observe(self, structure: Structure, flat: FlatState) -> bool:
        """See `UnchangedTensors.observe`."""
        unchanged = self._unchanged  # the save thread may find out that nothing can be shared
        return unchanged is not None and unchanged.observe(structure, flat)

    def group(self, structure: Structure, flat: FlatState) -> list[list[int]]:
        """See `UnchangedTensors.group`."""
        unchanged = self._unchanged
        return [] if unchanged is None else unchanged.group(structure, flat)

    def look(self, layout: Layout, flat: FlatState, storage: Storage | None) -> UnchangedFiles | None:
        """Find the files that a snapshot may share; None if it has no files of unchanged tensors.

        Args:
            layout: of the snapshot
            flat: the state
            storage: where it is saved; files are shared in one storage only
        """
        if self._unchanged is None or not layout.unchanged:
            return None
        with self._lock:
            kept, marks = self._kept_in(storage), self._marks
            if self._in_memory:
                kept = {key: file for key, file in self._kept.items() if not isinstance(file.held, str)}
        return UnchangedFiles(layout, flat, kept, marks, in_place=find_hash()[1])

    def settle(self, files: UnchangedFiles, read: Read, storage: Storage) -> list[SharedFile]:
        """Decide which files of a complete snapshot are shared, and return them.

        Args:
            files: of the snapshot
            read: returns bytes [start, end) of its image
            storage: where it is saved
        """
        kept = self._kept_in(storage)
        files.renew(kept)
        changed = files.settle(read, kept)
        if changed and self._unchanged is not None:
            self._unchanged.report_changed(changed, files.unseen)
            more = f" and {len(changed) - 3} more" if changed[3:] else ""
            names = ", ".join(f"'{key_of(path)}'" for path, _ in changed[:3])
            logger.info("changed after it was the same in earlier saves: %s%s", names, more)
        unknown = files.unknown(kept)
        if unknown:
            files.proved.update(self._find(files.contents(unknown, self._checksum), storage, False))
        # Another job that began at the same time may have written the same.
        own = [file for file in files.proved if self._own.get(files.key_of(file), 0) > 0]
        if own:
            found = self._find(files.contents(own, self._checksum), storage, True)
            files.proved.update(found)
            for file in own:
                self._own[files.key_of(file)] -= _LOOKS if file in found else 1
        return shared_files(files.proved)

    def committed(self, files: UnchangedFiles, storage: Storage, folder: str, written: Mapping[str, Any]) -> None:
        """Remember the files of a committed checkpoint, for the next snapshot.

        Args:
            files: of the snapshot that was committed
            storage: of the checkpoint
            folder: the checkpoint
            written: see `UnchangedFiles.keep`
        """
        try:
            kept = files.keep(storage, folder, written)
        except OSError as error:  # the checkpoint is whole; only the next one has to write everything
            logger.warning("the next checkpoint shares no files with %s: %s", folder, error)
            kept = {}
        if kept is None:
            self._unchanged, kept = None, {}
        self._own.update({files.key_of(file): _LOOKS for file in files.items if file not in files.proved})
        marks = dict(zip(kept, files.marks.values(), strict=False))
        with self._lock:
            self._kept, self._marks, self._storage = kept, marks, storage

    def failed(self, files: UnchangedFiles) -> None:
        """A snapshot was not committed. What it shares may be why: then the next one writes everything."""
        if any(isinstance(entry.held, str) for entry in files.proved.values()):
            self.close()

    def close(self) -> None:
        """Let go of the files that no snapshot refers to."""
        with self._lock:
            self._kept, self._marks = {}, {}


class ProvedReuse(FileReuse):
    """For a second place that a snapshot goes to: shares what is proved by then, and decides and remembers nothing.

    The save to the first place does that, at the same time.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._shared: dict[int, CommittedFile] = {}

    def settle(self, files: UnchangedFiles, read: Read, storage: Storage) -> list[SharedFile]:
        """Return what is proved; it stays open until `committed` or `failed`, whatever the other save finds."""
        # What the other save has found in a bucket is in the image too, and no open file.
        self._shared = {file: kept for file, kept in dict(files.proved).items() if not isinstance(kept.held, str)}
        return shared_files(self._shared)

    def committed(self, files: UnchangedFiles, storage: Storage, folder: str, written: Mapping[str, Any]) -> None:
        """Let go of the files."""
        self._shared = {}

    def failed(self, files: UnchangedFiles) -> None:
        """Let go of the files."""
        self._shared = {}
