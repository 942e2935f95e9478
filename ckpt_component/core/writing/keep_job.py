"""Run one keep job: checksum an image, and keep its files in memory by reference. Standard library only.

The counterpart of `write_job`, for snapshots that stay in the memory of this process. No byte of the image is copied:
a file is a range of the arena, followed by the encoded objects that belong to it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from operator import attrgetter
from time import perf_counter
from typing import NamedTuple

from ..storage.checksum import Checksum, find_checksum
from ..storage.memory.file_sums import FileSums
from ..storage.memory.kept_files import KeptFiles
from .range_writer import SumCursor
from .request import ReusedFile, WriteRequest, WriteResult
from .write_job import sizes_of, sum_objects, write_integrity
from .write_table import Extent, WriteTable

#: Bytes to sum at a time: a call of zlib or isal without the GIL, short enough to stop after a failure.
_CHUNK_BYTES = 4 << 20


class Image(NamedTuple):
    """The memory that holds an image: its number, and its descriptor."""

    number: int
    descriptor: int


def run_keep_job(
    request: WriteRequest, files: KeptFiles, image: Image, checksum_home: str | None = None
) -> WriteResult:
    """Keep a rank's files in memory, the integrity file last.

    Args:
        request: what to keep, and under which paths; its `source` maps the image
        files: takes the files
        image: the memory of the source; must not change while a file in it is kept
        checksum_home: as for `run_write_job`

    Raises:
        OSError: a file cannot be kept, because there is no memory or descriptor left
        ChecksumMissingError: the package of the table's checksum is not installed
    """
    table, folder, started = request.table, request.attempt.staging, perf_counter()
    checksum = find_checksum(table.checksum, checksum_home)
    sizes, shared = sizes_of(request), {each.file: each for each in request.shared}
    sums = _sums(request, checksum)
    tails = dict[str, bytes]()
    for blob in request.object_blobs:
        data = blob.filled(sums)
        tails[blob.file] = bytes(data)
        sums += sum_objects(blob, data, checksum)
    for number, spec in enumerate(table.files):
        path, tail = os.path.join(folder, spec.name), tails.pop(spec.name, b"")
        known = _sums_of(table, number, sums)
        if number in shared:
            files.put_image(path, files.new_source(), _descriptor(shared[number]), 0, spec.size, sums=known)
        else:
            files.put_image(path, image.number, image.descriptor, spec.base, spec.size, tail, known)
    for name, content in tails.items():
        files.put(os.path.join(folder, name), content)
    summed_at = perf_counter()
    listed = write_integrity(request, sizes, sums)
    return {
        "rank": request.rank,
        "files": listed,
        "bytes": sum(entry["size"] for entry in listed),
        "seconds": perf_counter() - started,
        "began": started,
        "synced_from": summed_at,
        "io": request.options.io,
        "sums": [],
        "shared": 0,
        "copied": [],
    }


def _descriptor(shared: ReusedFile) -> int:
    if isinstance(shared.held, str):  # of a bucket; the stager takes none where snapshots stay in memory
        raise TypeError(f"{shared.held} is not open, so it cannot be kept in memory")
    return shared.held


def _sums_of(table: WriteTable, file: int, sums: Sequence[int]) -> FileSums:
    """The checksums of a file of the table."""
    places, values = array("Q"), array("Q")
    for extent in sorted(
        (extent for group in table.extents for extent in group if extent.file == file), key=attrgetter("start")
    ):
        places.frombytes(extent.places.cast("B"))
        values.extend(sums[extent.first : extent.first + len(extent.places) // 2])
    return FileSums(table.checksum, places, values)


def _sums(request: WriteRequest, checksum: Checksum) -> list[int]:
    """The checksums of the image's items, by several threads; those of shared files are known."""
    table = request.table
    sums = [checksum.of(memoryview(b""))] * table.item_count  # for items without bytes
    for each in request.shared:
        for number, value in zip(table.items_of(each.file), each.sums, strict=True):
            sums[number] = value
    known = {each.file for each in request.shared}

    def sum_extents(extents: Sequence[Extent]) -> None:
        for extent in extents:
            if extent.file in known:
                continue
            base, cursor = table.files[extent.file].base, SumCursor(extent, checksum, sums)
            for start in range(extent.start, extent.end, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, extent.end)
                cursor.feed(request.source.buffers(base + start, base + end))

    threads = min(len(os.sched_getaffinity(0)), max(len(table.extents), 1))
    with request.fs.outside.pool(threads, "ckpt-sum") as pool:
        list(pool.map(sum_extents, table.extents))
    return sums
