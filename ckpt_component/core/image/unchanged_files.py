"""Files of unchanged tensors, which a checkpoint shares with an earlier one when their bytes are proved to be the same.

At a save, the tensors of such a file are hashed where they are, in the window in which training may not write. If all
hashes are those of the file that was committed before, nothing is copied and nothing is written: the file gets a
second path. Otherwise it is copied and written like any other file. A tensor's address and version only decide
whether it is worth hashing; they prove nothing, because `.data`, NumPy and foreign kernels change bytes without them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ...state.flatten import FlatState
from ...state.paths import key_of
from ...state.structure import Structure
from ...state.tensors import plain_addresses, tensor_bytes
from ...state.unchanged_tensors import Name, UnchangedTensors, mark_of, name_of
from ..outside import OUTSIDE
from ..storage.storage import Held, Storage
from .layout import Layout

#: Returns bytes [start, end) of an image, in one or more pieces.
Read = Callable[[int, int], Sequence[memoryview]]
#: A file that is shared: its number, what is held of it, checksums of its items.
SharedFile = tuple[int, Held, Sequence[int]]


@functools.cache
def find_hash() -> tuple[Callable[[], Any], bool]:
    """What makes the hash that proves equality, and whether it is faster than a copy. It releases the GIL.

    XXH3 with 128 bits takes half as long as a copy. SHA-256 takes longer than a copy, so it is computed of copies, on
    the save thread.
    """
    try:
        return import_module("xxhash").xxh3_128, True
    except ImportError:
        return hashlib.sha256, False


def _digest(pieces: Iterable[memoryview]) -> bytes:
    hashed = find_hash()[0]()
    for piece in pieces:
        hashed.update(piece)
    return bytes(hashed.digest())


class ItemBytes(NamedTuple):
    """An item of a file, and all that its bytes must be.

    Attributes:
        offset: where it begins in the file
        length: its size
        payload: where the tensor's bytes begin in the file
        nbytes: how many these are
        prefix: what is before them
        suffix: what is after them
        digest: their hash
    """

    offset: int
    length: int
    payload: int
    nbytes: int
    prefix: bytes
    suffix: bytes
    digest: bytes


@dataclass(frozen=True)
class FileBytes:
    """What a file must hold to be shared: its size, its items in their order, and the algorithm of their checksums."""

    size: int
    items: Sequence[ItemBytes]
    checksum: str


@dataclass(frozen=True, eq=False)
class CommittedFile:
    """A committed file, open, so that it can be shared even when its checkpoint was deleted.

    Attributes:
        held: from `Storage.hold`; released with the last reference to this object
        size: in bytes
        digests: of the payload of each item
        sums: checksum of each item
    """

    held: Held
    size: int
    digests: tuple[bytes, ...]
    sums: tuple[int, ...]


class UnchangedFiles:
    """The files of unchanged tensors of one snapshot.

    Args:
        layout: of the snapshot
        flat: the state
        kept: the committed files, by key
        marks: of the tensors when they were committed, by key of the file
        in_place: whether the tensors are hashed where they are; otherwise only their copies are

    Attributes:
        items: numbers of the items of each file, by number of the file
        candidates: the files that the snapshot is likely to share, with the committed ones
        proved: the files that it does share; complete when `settle` has returned
        marks: of its tensors, by number of the file
        unseen: those that have changed since their file was committed although their marks are the same
    """

    def __init__(
        self,
        layout: Layout,
        flat: FlatState,
        kept: Mapping[Any, CommittedFile],
        marks: Mapping[Any, Sequence[Any]],
        *,
        in_place: bool,
    ) -> None:
        self.items = layout.unchanged
        self.candidates: dict[int, CommittedFile] = {}
        self.proved: dict[int, CommittedFile] = {}
        tensors = {file: [flat.tensors[layout.tensor_of[item]] for item in items] for file, items in self.items.items()}
        self.marks = {file: list(map(mark_of, each)) for file, each in tensors.items()}
        self.unseen: set[Name] = set()
        self._marks = marks
        self._layout = layout
        self._digests: dict[int, tuple[bytes, ...]] = {}
        for file, each in tensors.items() if in_place else ():
            key = layout.unchanged_keys[file]
            if key in kept and marks.get(key) == self.marks[file] and None not in plain_addresses(each):
                self.candidates[file] = kept[key]

    @property
    def likely_bytes(self) -> int:
        """Size of the files that will probably be shared."""
        return sum(kept.size for kept in self.candidates.values())

    def prove(self, file: int, sources: Sequence[torch.Tensor]) -> bool:
        """Compare the tensors of a candidate with the committed file. Thread-safe for different files.

        Args:
            file: number of the file
            sources: the tensor of each item of the layout, in host memory; they must not change before this returns

        Returns:
            Whether all are the same. If not, they must be copied.
        """
        kept = self.candidates[file]
        for item, expected in zip(self.items[file], kept.digests, strict=True):
            if _digest([tensor_bytes(sources[item])]) != expected:
                return False
        self.proved[file] = kept
        return True

    def settle(self, read: Read, kept: Mapping[Any, CommittedFile]) -> list[Name]:
        """Hash the copies of the files that are not proved yet; a second call does nothing.

        Args:
            read: of the complete image
            kept: the committed files, by key

        Returns:
            The tensors that have changed since their file was committed.
        """
        layout, changed = self._layout, list[Name]()
        for file, items in self.items.items():
            if file in self.proved or file in self._digests:
                continue
            digests = []
            for number in items:
                start = layout.payload_at(layout.items[number])
                digests.append(_digest(read(start, start + layout.items[number].nbytes)))
            self._digests[file] = tuple(digests)
            before = kept.get(layout.unchanged_keys[file])
            if before is None:
                continue
            if before.digests == self._digests[file]:
                self.proved[file] = before
            marks, marks_before = self.marks[file], self._marks.get(layout.unchanged_keys[file], [None] * len(items))
            for place, number in enumerate(items):
                if before.digests[place] != digests[place]:
                    changed.append(name_of(layout.structure, layout.items[number].stored))
                    if marks[place] == marks_before[place]:
                        self.unseen.add(changed[-1])
        return changed

    def renew(self, kept: Mapping[Any, CommittedFile]) -> None:
        """Share the newest of equal files: of a bucket's, an older one may have been deleted."""
        for file, entry in self.proved.items():
            newest = kept.get(self._layout.unchanged_keys[file])
            if newest is not None and newest.digests == entry.digests:
                self.proved[file] = newest

    def unknown(self, kept: Mapping[Any, CommittedFile]) -> list[int]:
        """Numbers of the files that were never committed before: another checkpoint may have them."""
        keys = self._layout.unchanged_keys
        return [file for file in self._digests if file not in self.proved and keys[file] not in kept]

    def contents(self, files: Iterable[int], checksum: str) -> dict[int, FileBytes]:
        """What files must hold, by number.

        Args:
            files: their numbers; all are proved or hashed
            checksum: algorithm of the items' checksums
        """
        layout, around, contents = self._layout, self._layout.around, dict[int, FileBytes]()
        if around is None:
            return contents
        for file in files:
            digests = self.proved[file].digests if file in self.proved else self._digests[file]
            items = [
                ItemBytes(item.offset, item.length, item.payload, item.nbytes, *around(item), digest)
                for item, digest in zip(map(layout.items.__getitem__, self.items[file]), digests, strict=True)
            ]
            contents[file] = FileBytes(layout.files[file].size, items, checksum)
        return contents

    def key_of(self, file: int) -> Any:
        """What two files have in common that are equal if their tensors are."""
        return self._layout.unchanged_keys[file]

    def keep(self, storage: Storage, folder: str, written: Mapping[str, Any]) -> dict[Any, CommittedFile] | None:
        """Open the files of the committed checkpoint.

        Args:
            storage: of the checkpoint
            folder: the checkpoint
            written: a `WriteResult`, with the checksums of the items of each file, in order of `items`

        Returns:
            The files by key, for later snapshots; None: the storage does not share files.
        """
        kept: dict[Any, CommittedFile] = {}
        for file, sums in zip(self.items, written["sums"], strict=True):
            entry = self.proved.get(file)
            if entry is None or file in written["copied"] or isinstance(entry.held, str):
                spec, digests = self._layout.files[file], self._digests.get(file) if entry is None else entry.digests
                held = storage.hold(os.path.join(folder, spec.name))
                if held is None or digests is None:
                    return None
                entry = CommittedFile(held, spec.size, digests, tuple(sums))
                weakref.finalize(entry, storage.release, held)
            kept[self._layout.unchanged_keys[file]] = entry
        return kept


def shared_files(proved: Mapping[int, CommittedFile]) -> list[SharedFile]:
    """What is shared, of files by number."""
    return [(file, kept.held, kept.sums) for file, kept in sorted(proved.items())]


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
