"""Verify the files of a checkpoint against its checksums, and say what is damaged."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..core.commit.manifest import check_files, data_folder, hosts_missing, read_manifest, whole_manifest
from ..core.commit.names import MANIFEST, integrity_name
from ..core.commit.scan import is_torn
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import CHUNK_BYTES, GAP_BYTES, FileSet, RangeRead
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointPartError
from ..state.paths import key_of
from .opening import open_index
from .rank_index import RankIndex, StoredRange, checksum_of, read_rank_indexes

#: By their names.
_Algorithms = Mapping[str | None, Checksum]


class Damage(NamedTuple):
    """An item, or a whole file, that is damaged or cannot be read, and the error that says so."""

    file: str
    item: StoredRange | None
    error: CheckpointCorruptError


def verify_checkpoint(fs: Storage, path: str, progress: Progress = no_progress) -> bool:
    """Read every file of a checkpoint of ours, of any format, and compare its checksums.

    Args:
        fs: the file system
        path: folder of the checkpoint
        progress: follows the bytes

    Returns:
        False if it has no checksums, because another program saved it.

    Raises:
        CheckpointCorruptError: a file is missing, cannot be read, or differs from what was written; names the file
        CheckpointLoadError: a checksum cannot be computed here
    """
    manifest: Mapping[str, Any] | None = read_manifest(fs, path)
    if manifest is None:
        return False
    if fs.hosts:
        manifest = whole_manifest(fs, path, manifest)
    verify_files(fs, data_folder(fs, path, manifest), manifest, progress)
    return True


def verify_files(fs: Storage, folder: str, manifest: Mapping[str, Any], progress: Progress = no_progress) -> None:
    """Compare the files in a folder with a manifest, which is not in it yet; raises as `verify_checkpoint`."""
    _verify(fs, folder, manifest, range(manifest["world_size"]), progress)


def verify_part(fs: Storage, folder: str, part: Mapping[str, Any]) -> None:
    """Like `verify_files`, of a manifest with the files of some ranks only."""
    names = {entry["name"] for entry in part["files"]}
    ranks = [rank for rank in range(part["world_size"]) if integrity_name(rank) in names]
    _verify(fs, folder, part, ranks, no_progress)


def _verify(fs: Storage, folder: str, manifest: Mapping[str, Any], ranks: Sequence[int], progress: Progress) -> None:
    check_files(fs, folder, manifest)
    indexes = read_rank_indexes(fs, folder, manifest, ranks)  # verifies the integrity files
    items = [item for index in indexes for item in index.ranges()]
    verify_items(fs, folder, items, _raise, progress=progress)
    for damage in small_files(fs, folder, manifest):
        _raise(damage)


def verify_items(
    fs: Storage,
    folder: str,
    items: Collection[StoredRange],
    report: Callable[[Damage], None],
    *,
    done: Callable[[StoredRange], None] = lambda _: None,
    progress: Progress = no_progress,
    shared: bool = True,
) -> None:
    """Read items and compare their checksums, in several threads.

    Args:
        fs: the storage
        folder: folder of the files, all of which exist
        items: the items, which have checksums; the same one may occur more than once
        report: called with what is damaged, from any thread; what it raises ends the verification
        done: called with every intact item, from any thread
        progress: follows the bytes
        shared: as for `Storage.open_files`

    Raises:
        CheckpointCorruptError, CheckpointUnreadableError: a file cannot be opened
        CheckpointLoadError: a checksum cannot be computed here
    """
    with fs.open_files(folder, shared=shared) as files:
        verify_open_items(files, folder, items, report, done, progress)


def verify_open_items(
    files: FileSet,
    folder: str,
    items: Collection[StoredRange],
    report: Callable[[Damage], None],
    done: Callable[[StoredRange], None] = lambda _: None,
    progress: Progress = no_progress,
) -> None:
    """`verify_items`, of the open files of a folder."""
    algorithms = {kind: checksum_of(folder, str(kind)) for kind in {item.checksum_kind for item in items}}

    def verify(group: list[StoredRange]) -> None:
        first, end = group[0], max(map(attrgetter("end"), group))
        sums: list[int | None] = []

        def damage() -> str | None:
            if first.length > CHUNK_BYTES:
                sums[:] = [_streamed(files, first, algorithms)]
            else:
                sums[:] = _summed(files, group, end - first.offset, algorithms)
            bad = [item for item, value in zip(group, sums, strict=True) if value != item.checksum]
            return _name(bad[0]) if bad else None

        try:
            files.verified(first.file, first.offset, end - first.offset, damage)
        except CheckpointCorruptError as error:  # it cannot be read
            for item in group:
                report(Damage(item.file, item, error))
            return
        for item, value in zip(group, sums, strict=True):
            if value == item.checksum:
                done(item)
            else:
                report(Damage(item.file, item, files.damaged(item.file, _name(item))))

    files.read_all(
        [
            RangeRead(group[0].file, group[0].offset, group[-1].end - group[0].offset, partial(verify, group))
            for group in _groups(items)
        ],
        progress,
    )


def small_files(fs: Storage, folder: str, manifest: Mapping[str, Any]) -> Iterator[Damage]:
    """Compare the files whose checksum is in the manifest itself, and say which are damaged."""
    for entry in manifest["files"]:
        if "crc32" not in entry:
            continue
        file = os.path.join(folder, entry["name"])
        try:
            data = fs.read_verified(file, entry["size"], entry["crc32"])
        except OSError as error:
            yield Damage(entry["name"], None, read_failure(file, error))
            continue
        if data is None:
            text = f"{file} does not match its checksum in manifest.json."
            yield Damage(entry["name"], None, CheckpointCorruptError(text))


def _name(item: StoredRange) -> str:
    return f"The item at bytes {item.offset} to {item.end}"


def _groups(items: Iterable[StoredRange]) -> Iterator[list[StoredRange]]:
    """Items to read at once: each group fits `CHUNK_BYTES`, unless it is one larger item."""
    group: list[StoredRange] = []
    for item in sorted(set(items), key=attrgetter("file", "offset", "length")):
        if group:
            first, last = group[0], group[-1]
            near = item.file == last.file and 0 <= item.offset - last.end <= GAP_BYTES
            if not near or item.end - first.offset > CHUNK_BYTES:
                yield group
                group = []
        group.append(item)
    if group:
        yield group


def _summed(files: FileSet, group: list[StoredRange], length: int, algorithms: _Algorithms) -> list[int | None]:
    """The checksums of a group of small items; None for those after the end of the file."""
    first = group[0]
    data = files.view(first.file, first.offset, length)
    if data is None:
        if len(group) == 1:
            return [None]
        return [_summed(files, [item], item.length, algorithms)[0] for item in group]
    sums: list[int | None] = []
    with data:
        for item in group:
            begin = item.offset - first.offset
            with data[begin : begin + item.length] as payload:
                sums.append(algorithms[item.checksum_kind].of(payload))
    return sums


def _streamed(files: FileSet, item: StoredRange, algorithms: _Algorithms) -> int | None:
    """The checksum of a large item; None if the file is too short."""
    stream = algorithms[item.checksum_kind].stream()
    for offset in range(item.offset, item.end, CHUNK_BYTES):
        length = min(CHUNK_BYTES, item.end - offset)
        data = files.view(item.file, offset, length)
        if data is None:
            return None
        with data:
            stream.update(data)
    return stream.value()


def _raise(damage: Damage) -> None:
    raise damage.error


@dataclass
class Inspection:
    """A checkpoint before its data is read.

    Attributes:
        storage: its storage
        path: the checkpoint
        folder: the folder of its files
        items: items with a checksum that can be read
        lost: items that a file is too short for, or is missing
        damages: what is wrong already: files that are missing or of another size, small files, indexes
        sizes: bytes of its files, by name
        verifiable: whether all data has checksums
        indexes: what each rank wrote, if the checkpoint is ours and the index is intact
        elsewhere: the hosts whose files are not here, and are not damaged by that
    """

    storage: Storage
    path: str
    folder: str
    items: list[StoredRange] = field(default_factory=list)
    lost: list[StoredRange] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    verifiable: bool = True
    indexes: list[RankIndex] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def keys_by_place(self) -> dict[tuple[str, int], list[str]]:
        """The keys whose bytes are in the item at an offset of a file."""
        keys = defaultdict(list)
        for index in self.indexes:  # a damaged checkpoint may have nothing else that says which keys it has
            for path, piece in [*zip(index.paths, map(index.range_of, index.numbers), strict=True), *index.objects]:
                keys[piece.file, piece.offset].append(key_of(path))
        if keys:
            return keys
        try:
            opened = open_index(self.storage, self.path)
            for entry in opened.entries.values():
                for piece in opened.contents.ranges_at(entry.place):
                    keys[piece.file, piece.offset].append(entry.key)
        except CheckpointError:  # it is too damaged
            keys.clear()
        return keys


def inspect(fs: Storage, path: str) -> Inspection:
    """Find out what there is to verify. Damage is collected, not raised.

    Args:
        fs: the file system
        path: the checkpoint, a folder or a file

    Raises:
        CheckpointNotFoundError: there is no checkpoint
        CheckpointLoadError: another release wrote it, or a checksum cannot be computed here
        CheckpointUnreadableError: the folder cannot be read
    """
    try:
        manifest = read_manifest(fs, path) if fs.is_folder(path) else None
        folder = path if manifest is None else data_folder(fs, path, manifest)
    except CheckpointPartError:
        raise
    except CheckpointCorruptError as error:
        return Inspection(fs, path, path, damages=[Damage(MANIFEST, None, error)])
    if manifest is not None:
        return _own(fs, path, folder, manifest)
    if fs.is_folder(path) and is_torn(fs.names(path)):
        lost = CheckpointCorruptError(f"{path} has no manifest: it was not committed, or has lost it.")
        return Inspection(fs, path, path, damages=[Damage(MANIFEST, None, lost)])
    return _foreign(fs, path)


def _own(fs: Storage, path: str, folder: str, manifest: Mapping[str, Any]) -> Inspection:
    sizes = {entry["name"]: entry["size"] for entry in manifest["files"]}
    elsewhere = hosts_missing(manifest, {name for name in sizes if not fs.exists(os.path.join(folder, name))})
    for name in (name for files in elsewhere.values() for name in files):
        del sizes[name]
    inspection = Inspection(fs, path, folder, sizes=sizes, elsewhere=sorted(elsewhere))
    whole, there = [], {}
    for entry in (entry for entry in manifest["files"] if entry["name"] in sizes):
        there[entry["name"]] = fs.size(os.path.join(folder, entry["name"])) or 0
        try:
            check_files(fs, folder, {"files": [entry]})
            whole.append(entry)
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(entry["name"], None, error))
    inspection.damages += small_files(fs, folder, {"files": whole})
    bad = {damage.file for damage in inspection.damages}
    for rank in range(manifest["world_size"]):
        if integrity_name(rank) in bad or integrity_name(rank) not in sizes:
            continue
        try:
            (index,) = read_rank_indexes(fs, folder, manifest, [rank])
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(integrity_name(rank), None, error))
            continue
        inspection.indexes.append(index)
        checksum_of(folder, index.checksum)  # it can be computed here
        for item in index.ranges():
            (inspection.items if item.end <= there[item.file] else inspection.lost).append(item)
    return inspection


def _foreign(fs: Storage, path: str) -> Inspection:
    """Opening it checks sizes and structure. Of other programs' formats, only `torch.save` may have checksums."""
    try:
        index = open_index(fs, path)
        ranges = {piece._replace(payload=None, offsets=(), shape=(), view=()) for piece in index.ranges()}
    except CheckpointCorruptError as error:
        return Inspection(fs, path, path, damages=[Damage(os.path.basename(path), None, error)])
    items = [piece for piece in ranges if piece.checksum is not None]
    return Inspection(fs, path, index.folder, items, sizes={**index.files}, verifiable=index.verified)
