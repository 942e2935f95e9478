"""Bring the files of a folder to a version: whole ones copied and compared, or the changes of the last one."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..core.commit.manifest import check_files, data_folder
from ..core.outside import Future, Outside, Pool
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import find_checksum
from ..core.storage.file_set import FileSet
from ..core.storage.files import FileStorage
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, first_keys
from ..formats import open_index
from ..formats.rank_index import StoredRange
from .delta import DeltaFiles, apply_delta, require_codec
from .versions import Version

Self = TypeVar("Self", bound="TensorFiles")


class TensorFiles:
    """The tensors of a folder. A context manager, which holds the files open; thread-safe for different tensors.

    Args:
        fs: the file system
        folder: a Hugging Face folder
        changes: whether tensors are changed, too

    Raises:
        CheckpointCorruptError: a header, or the index of several files, is damaged
        CheckpointNotFoundError: there are no weights
    """

    def __init__(self, fs: FileStorage, folder: str, *, changes: bool = False) -> None:
        self._fs, self._folder, self._changes = fs, folder, changes
        contents = open_index(fs, folder).contents
        self._places: dict[str, StoredRange] = {
            name: contents.ranges_at(entry.place)[0] for name, entry in contents.tensors.items()
        }
        self._open: dict[str, int] = {}
        self._lock = fs.outside.lock()

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors."""
        return self._places.keys()

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self._places[name].length

    def read(self, name: str, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a tensor."""
        place = self._places[name]
        self._fs.read_held(self._descriptor(place.file), buffer, place.offset)

    def write(self, name: str, data: memoryview) -> None:
        """Change the bytes of a tensor."""
        place, fd = self._places[name], self._descriptor(self._places[name].file)
        self._fs.write(fd, [data], place.offset)
        self._fs.start_writeback(fd, place.offset, place.length)

    def copy(self, name: str, source: TensorFiles) -> None:
        """Change a tensor to what another folder with the same files has."""
        place = self._places[name]
        self._fs.copy(self._descriptor(place.file), source._descriptor(place.file), place.offset, place.length)

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                path = os.path.join(self._folder, name)
                self._open[name] = self._fs.open_again(path) if self._changes else int(self._fs.hold(path) or 0)
            return self._open[name]

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            fd = self._open.popitem()[1]
            if self._changes:
                self._fs.close(fd)
            else:
                self._fs.release(fd)


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

    def damage() -> str | None:
        stream, offset = checksum.stream(), 0
        for block in _blocks(opened, source, name, size, outside, pool):
            stream.update(block)
            fs.write(fd, [block], offset)
            fs.start_writeback(fd, offset, block.nbytes)
            offset += block.nbytes
            advance(block.nbytes)
        return None if stream.value() == entry["crc32"] else "the content"

    with fs.durable_at_end(fs.create(os.path.join(folder, name), size)) as fd:
        damaged = opened.verified(name, 0, size, damage)
        if damaged is not None:
            raise opened.damaged(name, damaged)


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


#: A thread holds one tensor in memory.
_MAX_THREADS = 4


def apply_deltas(
    storage: Storage,
    deltas: Sequence[Version],
    base: TensorFiles,
    target: TensorFiles,
    behind: Collection[str] = (),
    progress: Progress = no_progress,
) -> set[str]:
    """Bring a folder from the version of another one to the last of its deltas. All tensors that change are verified.

    Args:
        storage: the storage of the versions
        deltas: the versions after that of `base`, in order
        base: has the version that the first delta is based on; may be `target` itself
        target: what is changed
        behind: names of the tensors that differ between `base` and `target` now
        progress: follows the bytes of the tensors that change

    Returns:
        The names of the tensors that differ between `base` and `target` now.

    Raises:
        CheckpointConfigError: a package is missing
        CheckpointCorruptError: a delta is damaged, or does not fit; the target has to be thrown away
        OSError: the target cannot be written
    """
    require_codec("A version that is not whole")
    changed: set[str] = set()
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with storage.outside.pool(threads, "ckpt-pull") as pool:
        for version in deltas:
            files = DeltaFiles(storage, version)
            names = files.names()
            strangers = [name for name in names if name not in target.names]
            if strangers:
                raise CheckpointCorruptError(
                    f"{version.path} changes {first_keys(strangers, 5)}, which its base does not have."
                )

            def change(name: str, data: memoryview, checksum: str, what: str, encoding: str = files.encoding) -> int:
                tensor = memoryview(bytearray(target.nbytes(name)))
                (target if name in changed else base).read(name, tensor)
                apply_delta(encoding, data, tensor, checksum, what)
                target.write(name, tensor)
                return len(tensor)

            work: deque[Future[int]] = deque()
            what = f"reading {os.path.basename(version.path)}"
            with progress(what, sum(map(target.nbytes, names))) as advance:
                for name in names:
                    if len(work) == 2 * threads:  # what waits is in memory
                        advance(_first_of(work, storage.outside))
                    work.append(pool.submit(change, name, *files.read(name), f"'{name}' of {version.path}"))
                while work:
                    advance(_first_of(work, storage.outside))
            changed.update(names)
        for name in set(behind) - changed:
            target.copy(name, base)
    return changed


def _first_of(work: deque[Future[int]], outside: Outside) -> int:
    """The result of the first of these; a tensor in memory is changed and written, by threads of this process."""
    first = work.popleft()
    outside.wait_for([first], None)
    return first.result(0)
