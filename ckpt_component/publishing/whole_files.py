"""Copy the files of a whole version, each compared with its checksum on the way."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.commit.manifest import check_files, data_folder
from ..core.outside import Future, Outside, Pool
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import find_checksum
from ..core.storage.file_set import FileSet
from ..core.storage.files import FileStorage
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError
from .versions import Version

#: Bytes of a block, which one request to a bucket brings, and how many of them are on their way.
_BLOCK_BYTES, _AHEAD = 4 << 20, 8


def copy_whole(
    storage: Storage, version: Version, fs: FileStorage, folder: str, progress: Progress = no_progress
) -> int:
    """Copy the files of a whole version into a new folder. When this returns, each is verified and durable.

    Args:
        storage: the storage of the version
        version: the version
        fs: the file system of the folder
        folder: where they go
        progress: follows the bytes

    Returns:
        The bytes that were read.

    Raises:
        CheckpointCorruptError: a file is damaged or missing; CheckpointUnreadableError: it cannot be read
        OSError: the folder cannot be written
    """
    source, files = data_folder(storage, version.path, version.manifest), version.manifest["files"]
    check_files(storage, source, version.manifest)
    with (
        storage.open_files(source) as opened,
        storage.outside.pool(_AHEAD, "ckpt-pull") as pool,
        progress(f"reading {os.path.basename(version.path)}", version.nbytes) as advance,
    ):
        for entry in files:
            _copy_file(opened, source, entry, fs, folder, storage.outside, pool, advance)
    return version.nbytes


def _copy_file(
    opened: FileSet,
    source: str,
    entry: Mapping[str, Any],
    fs: FileStorage,
    folder: str,
    outside: Outside,
    pool: Pool,
    advance: Callable[[int], None],
) -> None:
    name, size = entry["name"], entry["size"]
    if "crc32" not in entry:
        raise CheckpointCorruptError(f"The manifest of {source} has no checksum of {name}.")
    checksum = find_checksum("crc32")
    opened.size(name)  # opens it, before threads read it
    fd = fs.create(os.path.join(folder, name), size)

    def damage() -> str | None:
        stream, offset = checksum.stream(), 0
        for block in _blocks(opened, source, name, size, outside, pool):
            stream.update(block)
            fs.write(fd, [block], offset)
            fs.start_writeback(fd, offset, block.nbytes)
            offset += block.nbytes
            advance(block.nbytes)
        return None if stream.value() == entry["crc32"] else "the content"

    try:
        damaged = opened.verified(name, 0, size, damage)
        if damaged is not None:
            raise opened.damaged(name, damaged)
        fs.sync(fd)
    finally:
        fs.close(fd)


def _blocks(opened: FileSet, source: str, name: str, size: int, outside: Outside, pool: Pool) -> Iterator[memoryview]:
    """The blocks of a file in order, some of them read ahead. A block is valid until the next one."""
    free = [memoryview(bytearray(min(_BLOCK_BYTES, size))) for _ in range(min(_AHEAD, -(-size // _BLOCK_BYTES)))]
    coming: deque[tuple[memoryview, memoryview, Future[bool]]] = deque()
    starts = iter(range(0, size, _BLOCK_BYTES))
    while True:
        while free and (start := next(starts, None)) is not None:
            block = free.pop()
            part = block[: size - start]
            coming.append((block, part, pool.submit(opened.fill, name, part, start)))
        if not coming:
            return
        block, part, filled = coming.popleft()
        outside.wait_for([filled], None)  # requests have the deadlines of the store's client
        if not filled.result(0):
            path = os.path.join(source, name)
            raise read_failure(path, OSError(errno.EIO, "it is too short", path))
        yield part
        free.append(block)
