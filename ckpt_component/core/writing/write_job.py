"""Run one write job: write byte ranges of an image to files in parallel, with checksums. Standard library only.

The job runs in the background writer process, which imports no torch, or with `caller=inline` in the trainer. It is
plain data: the layout table says which bytes go where, and the source provides them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib  # the manifest has a crc32 of each integrity file, whatever checksum the items have
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from ..commit.names import integrity_name
from ..storage.checksum import Checksum, find_checksum
from ..storage.new_names import new_token
from ..storage.storage import Storage
from .range_writer import LaneWriter
from .request import ObjectBlob, WriteRequest, WriteResult

#: A smaller image has nothing to gain, and a trial would take longer than the save.
SMALLEST = 32 << 20
TRIED_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
#: How much longer than a buffered write a direct one may take beside training. Of a save of 0.8 GB on two cores, the
#: writer's CPU time was 0.29 s buffered and 0.04 s direct.
_PATIENCE = 1.5
#: Trials per mode; the fastest counts. One trial chose the slower mode in 5 of 60 runs, the best of two in none of 30.
_TRIALS = 2


def choose_io(request: WriteRequest, *, in_memory: bool, beside_training: bool) -> str:
    """Return `direct` or `buffered`; or `auto`, which writes buffered, if there is no trial to make.

    Args:
        request: the request to choose for
        in_memory: whether the folder's files are kept only in memory
        beside_training: whether training continues during the write
    """
    if request.options.io != "auto":
        return request.options.io
    if in_memory:
        return "buffered"
    if request.source.nbytes < SMALLEST or not request.fs.has_direct_io:
        return "auto"
    (block,) = request.source.buffers(0, BLOCK_BYTES, whole=True)
    return better_mode(*try_modes(request.fs, request.attempt.staging, block), beside_training=beside_training)


def better_mode(buffered: float, direct: float | None, *, beside_training: bool) -> str:
    """Return `direct` or `buffered`, by what `try_modes` found; `beside_training` as of `choose_io`."""
    patience = _PATIENCE if beside_training else 1
    return "direct" if direct is not None and direct < buffered * patience else "buffered"


def try_modes(fs: Storage, folder: str, block: memoryview) -> tuple[float, float | None]:
    """Write `TRIED_BYTES` a few times into `folder` in both modes, until they are durable.

    Args:
        fs: file system operations
        folder: a folder on the disk to test; the trial file is deleted
        block: `BLOCK_BYTES` bytes, page-aligned in memory

    Returns:
        The least seconds buffered and direct; None if the file system has no direct I/O.

    Raises:
        OSError: a buffered write failed, so the save would fail too
    """
    path = os.path.join(folder, f".io-trial.{new_token(fs.outside)}")  # ranks try at the same time
    buffered, direct = [], []
    for _ in range(_TRIALS):
        buffered.append(_seconds(fs, path, block, direct=False))
        try:
            direct.append(_seconds(fs, path, block, direct=True))
        except OSError:
            # No direct I/O: EINVAL from open or write, EOPNOTSUPP or others. The save is then buffered and logs that.
            return min(buffered), None
    return min(buffered), min(direct)


def _seconds(fs: Storage, path: str, block: memoryview, *, direct: bool) -> float:
    started = fs.outside.now()
    with contextlib.ExitStack() as cleaning:
        fd = fs.create(path, TRIED_BYTES)
        cleaning.callback(fs.unlink, path)
        cleaning.callback(fs.close, fd)
        target = fd
        if direct:
            target = fs.open_direct(path)
            cleaning.callback(fs.close, target)
        for position in range(0, TRIED_BYTES, BLOCK_BYTES):
            fs.write(target, [block], position)
        fs.sync(target)
        elapsed = fs.outside.now() - started
    return elapsed


def run_write_job(
    request: WriteRequest,
    checksum_home: str | None = None,
    *,
    beside_training: bool = False,
    keeps_cached: bool = False,
) -> WriteResult:
    """Write a rank's files into the staging folder, each fsynced, and the integrity file last.

    Args:
        request: what to write, and where; the staging folder must exist
        checksum_home: where the checksum's package is installed, for a process without site-packages
        beside_training: whether training continues during the write
        keeps_cached: leave in the page cache what buffered writes put there

    Raises:
        OSError: the first failure of any parallel writer, after all of them have stopped
        ChecksumMissingError: the package of the table's checksum is not installed
    """
    fs, folder, table = request.fs, request.attempt.staging, request.table
    started = perf_counter()
    checksum = find_checksum(table.checksum, checksum_home)
    in_memory = fs.in_memory(folder)
    io = choose_io(request, in_memory=in_memory, beside_training=beside_training)
    descriptors: dict[str, int] = {}
    direct: dict[str, int] = {}
    sizes = sizes_of(request)
    shared = {table.files[each.file].name for each in request.shared}
    written = [spec.name for spec in table.files if spec.name not in shared]
    sums = first_sums(request, checksum)
    with _closing(fs, descriptors), _closing(fs, direct):
        _create(fs, folder, {name: size for name, size in sizes.items() if name not in shared}, descriptors)
        copied = list[int]()
        for each in request.shared:
            if not fs.share(each.held, os.path.join(folder, table.files[each.file].name)):
                copied.append(each.file)
        if io == "direct":
            for name in written:
                direct[name] = _open_direct(fs, os.path.join(folder, name))
        opened = direct or descriptors
        targets = {file: opened[spec.name] for file, spec in enumerate(table.files) if spec.name in opened}
        LaneWriter(request, targets, checksum, sums, direct=bool(direct), in_memory=in_memory).run()
        for name in written if direct else ():
            fs.truncate(descriptors[name], sizes[name])  # direct I/O writes the last page as a whole
        for blob, data in filled_objects(request, checksum, sums):
            fs.write(descriptors[blob.file], [data], blob.offset)
        synced_from = perf_counter()
        with fs.outside.pool(len(descriptors), "ckpt-sync") as pool:
            list(pool.map(fs.sync, descriptors.values()))
        for descriptor in () if keeps_cached else descriptors.values():
            fs.drop_cached(descriptor)
    result = end_job(request, sizes, sums, started, synced_from, io)
    result["sums"] = [[sums[number] for number in table.items_of(file)] for file in request.kept]
    result["shared"] = sum(sizes[name] for name in shared - {table.files[file].name for file in copied})
    result["bytes"] -= result["shared"]
    result["copied"] = copied
    return result


def sizes_of(request: WriteRequest) -> dict[str, int]:
    """The sizes of a rank's files, by name; without the integrity file."""
    sizes = {spec.name: spec.size for spec in request.table.files}
    for blob in request.object_blobs:
        sizes[blob.file] = max(sizes.get(blob.file, 0), blob.offset + blob.data.nbytes)
    return sizes


def first_sums(request: WriteRequest, checksum: Checksum) -> list[int]:
    """The checksums of all items of the image, as far as they are known: of those in shared files, or without bytes."""
    sums = [checksum.of(memoryview(b""))] * request.table.item_count
    for each in request.shared:
        for number, value in zip(request.table.items_of(each.file), each.sums, strict=True):
            sums[number] = value
    return sums


def filled_objects(
    request: WriteRequest, checksum: Checksum, sums: list[int]
) -> Iterator[tuple[ObjectBlob, memoryview]]:
    """The encoded objects, with checksums of the image in them where they have those; their own ones join `sums`."""
    for blob in request.object_blobs:
        data = blob.filled(sums)
        sums += [checksum.of(data[offset - blob.offset :][:length]) for offset, length in blob.items]
        yield blob, data


def end_job(
    request: WriteRequest, sizes: Mapping[str, int], sums: Sequence[int], began: float, synced_from: float, io: str
) -> WriteResult:
    """Write the integrity file, a rank's vote, when all its other files are there.

    Args:
        request: what was written
        sizes: from `sizes_of`
        sums: checksums of all items, those of objects last
        began: as in the result, like the next two
        synced_from: see above
        io: see above

    Returns:
        What was written, if no file is shared with an earlier checkpoint.
    """
    blobs, name = request.object_blobs, integrity_name(request.rank)
    places = [(blob.file, offset, length) for blob in blobs for offset, length in blob.items]
    files: list[dict[str, Any]] = [{"name": name, "size": size} for name, size in sizes.items()]
    integrity = b'{"version":1,"rank":%d,"files":%s,"layout":%s,"extras":%s,"checksum":"%s","sums":%s}\n' % (
        request.rank,
        json.dumps(files, separators=(",", ":")).encode(),
        request.table.description,
        json.dumps(places, separators=(",", ":")).encode(),
        request.table.checksum.encode(),
        json.dumps(sums, separators=(",", ":")).encode(),
    )
    request.fs.write_new(os.path.join(request.attempt.staging, name), integrity)
    request.fs.sync_folder(request.attempt.staging)
    return {
        "rank": request.rank,
        "files": [*files, {"name": name, "size": len(integrity), "crc32": zlib.crc32(integrity)}],
        "bytes": sum(sizes.values()) + len(integrity),
        "seconds": perf_counter() - began,
        "began": began,
        "synced_from": synced_from,
        "io": io,
        "sums": [],
        "shared": 0,
        "copied": [],
    }


def _create(fs: Storage, folder: str, sizes: Mapping[str, int], descriptors: dict[str, int]) -> None:
    """Create the files in parallel: reserving 1.5 GB of memory takes one thread half as long as the copy into it."""

    def create(name: str) -> None:
        descriptors[name] = fs.create(os.path.join(folder, name), sizes[name])

    with fs.outside.pool(len(sizes), "ckpt-create") as pool:
        list(pool.map(create, sizes))


def _open_direct(fs: Storage, path: str) -> int:
    try:
        return fs.open_direct(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        text = "this file system has no direct I/O; use checkpoint.writer.io=auto or buffered"
        raise OSError(error.errno, text, path) from error


@contextlib.contextmanager
def _closing(fs: Storage, descriptors: Mapping[str, int]) -> Iterator[None]:
    """On exit, close all descriptors, even if closing one fails; raise the first error."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    for fd in descriptors.values():
        try:
            fs.close(fd)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure
