"""Files of unchanged tensors, which a checkpoint shares with an earlier one when their bytes are proved to be the same.

At a save, the tensors of such a file are hashed where they are, in the window in which training may not write. If all
hashes are those of the file that was committed before, nothing is copied and nothing is written: the file gets a
second path. Otherwise it is copied and written like any other file. A tensor's address and version only decide
whether it is worth hashing; they prove nothing, because `.data`, NumPy and foreign kernels change bytes without them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..state.dense_tensors import plain_addresses, tensor_bytes
from ..state.flatten import FlatState
from ..state.unchanged_tensors import Name, mark_of, name_of
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
