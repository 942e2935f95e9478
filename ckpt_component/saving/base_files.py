"""Files of other checkpoints that a save may share: of this run before it was started again, of a base, of a sweep.

Eight jobs that tune one base store it once: each links the file of another, and depends on its bytes alone. What a file
holds is read and hashed before it is shared, so a damaged one, or one of another base, is not.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..core.commit.manifest import data_folder, read_manifest
from ..core.commit.names import StepNames
from ..core.commit.scan import scan_steps
from ..core.image.unchanged_files import CommittedFile, FileBytes, find_hash
from ..core.storage.storage import Storage
from ..errors import CheckpointError
from ..formats.rank_index import ItemColumns, RankIndex, read_rank_indexes

logger = logging.getLogger(__name__)

#: Of each folder, so many of the newest checkpoints are looked at.
_NEWEST = 8
_READ_BYTES = 8 << 20


class BaseFiles:
    """Finds files with given bytes in checkpoints.

    Args:
        folders: returns folders of runs, and checkpoints, the most likely first; the first one is the run's own
        storage: of all of them
        names: how runs name their checkpoints
    """

    def __init__(self, folders: Callable[[], Iterable[str]], storage: Storage, names: StepNames) -> None:
        self._folders = folders
        self._storage = storage
        self._names = names

    def find(self, wanted: Mapping[int, FileBytes], storage: Storage, elsewhere: bool) -> dict[int, CommittedFile]:
        """Look for files.

        Args:
            wanted: what they must hold, by any number
            storage: where they are to be shared; if it is another one, there are none
            elsewhere: only in folders of other runs whose paths come before the own one

        Returns:
            Those that were found, by their number.
        """
        found: dict[int, CommittedFile] = {}
        for path in self._checkpoints(elsewhere) if storage is self._storage else ():
            missing = {number: each for number, each in wanted.items() if number not in found}
            if not missing:
                break
            try:
                found.update(self._find_in(path, missing))
            except (OSError, CheckpointError) as error:  # it may be deleted now, or be damaged: another may serve
                logger.info("%s cannot be shared: %s", path, error)
        return found

    def _checkpoints(self, elsewhere: bool) -> Iterator[str]:
        own, *others = folders = list(self._folders())
        for folder in (each for each in others if each < own) if elsewhere else folders:
            try:
                if read_manifest(self._storage, folder) is not None:
                    yield folder
                    continue
                steps = scan_steps(self._storage, folder, self._names).committed
            except (OSError, CheckpointError) as error:
                logger.info("%s cannot be shared: %s", folder, error)
                continue
            for step in reversed(steps[-_NEWEST:]):
                yield os.path.join(folder, self._names.folder(step))

    def _find_in(self, path: str, wanted: Mapping[int, FileBytes]) -> dict[int, CommittedFile]:
        manifest = read_manifest(self._storage, path)
        if manifest is None:
            return {}
        sizes = {entry["name"]: entry["size"] for entry in manifest["files"]}
        if {each.size for each in wanted.values()}.isdisjoint(sizes.values()):
            return {}
        folder, found = data_folder(self._storage, path, manifest), dict[int, CommittedFile]()
        for index in read_rank_indexes(self._storage, folder, manifest):
            for name, numbers in _items_by_file(index).items():
                tensors = index.tensors
                places = [tuple(column[item] for column in _places(tensors)) for item in numbers]
                for number, each in wanted.items():
                    its = [(item.offset, item.length, item.payload, item.nbytes) for item in each.items]
                    fits = (each.size, its, each.checksum) == (sizes[name], places, index.checksum)
                    if number not in found and fits:
                        sums = [tensors.checksums[item] for item in numbers]
                        kept = self._proved(os.path.join(folder, name), each, sums)
                        if kept is not None:
                            found[number] = kept
        return found

    def _proved(self, path: str, wanted: FileBytes, sums: Sequence[int]) -> CommittedFile | None:
        """Open a file, and read it to learn whether it has the bytes."""
        storage = self._storage
        held = storage.hold(path)
        if held is None:
            return None
        kept = CommittedFile(held, wanted.size, tuple(item.digest for item in wanted.items), tuple(sums))
        weakref.finalize(kept, storage.release, held)
        block = memoryview(bytearray(_READ_BYTES))
        for item in wanted.items:
            around = ((item.offset, item.prefix), (item.offset + item.length - len(item.suffix), item.suffix))
            for at, expected in around:
                storage.read_held(held, block[: len(expected)], at)
                if block[: len(expected)] != expected:
                    return None
            hashed = find_hash()[0]()
            for at in range(0, item.nbytes, _READ_BYTES):
                part = block[: min(_READ_BYTES, item.nbytes - at)]
                storage.read_held(held, part, item.payload + at)
                hashed.update(part)
            if hashed.digest() != item.digest:
                return None
        return kept


def _places(items: ItemColumns) -> tuple[Sequence[int], ...]:
    return items.offsets, items.lengths, items.payloads, items.nbytes


def _items_by_file(index: RankIndex) -> dict[str, list[int]]:
    """Numbers of the tensors' items of each file, in their order in it."""
    tensors, items = index.tensors, dict[str, list[int]]()
    for number in sorted(range(len(tensors.offsets)), key=tensors.offsets.__getitem__):
        items.setdefault(tensors.names[tensors.files[number]], []).append(number)
    return items
