"""Verify the bytes of a checkpoint by the checksums of its items, many at once, without loading it.

Small neighbouring items are read together, because an item costs more than its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import CheckpointCorruptError
from ..commit.manifest import check_files, data_folder, read_manifest, whole_manifest
from ..commit.names import integrity_name
from ..progress import Progress, no_progress
from ..storage.checksum import Checksum
from ..storage.file_set import CHUNK_BYTES, GAP_BYTES, FileSet, RangeRead
from ..storage.safe_open import read_failure
from ..storage.storage import Storage
from .rank_index import StoredRange, checksum_of, read_rank_indexes

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
