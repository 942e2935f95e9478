"""Copy, write and read bytes with plain system calls, without serialization, planning or commit."""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ....memory.huge_pages import map_private

Checksum = Callable[[memoryview], int]

_BLOCK = 8 << 20
#: So much is read before its checksum is taken: it is in the cache of the core then.
_READ_BLOCK = 1 << 20
#: So many threads read, each whole files.
_READERS = 2


def block_of(nbytes: int) -> mmap.mmap:
    """Memory that starts at a page, as direct I/O needs it, in huge pages, which disks take best, and there already."""
    block = map_private(rounded(nbytes))
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    return block


def rounded(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def timed(call: Callable[[], object], on_device: bool = False) -> float:
    """Seconds that a call takes, with what it leaves to the CUDA device."""
    if on_device:
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_device:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def median(values: Sequence[float | None]) -> float | None:
    """Of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def copy(source: mmap.mmap, target: mmap.mmap) -> float:
    """Seconds to copy one block to another, with all of torch's threads."""
    one, other = (torch.frombuffer(block, dtype=torch.uint8) for block in (source, target))
    return timed(lambda: other.copy_(one))


def write(source: mmap.mmap, nbytes: int, folder: str, threads: int, *, direct: bool) -> float | None:
    """Seconds to write the bytes and sync them, by threads with a file each; the files are removed after that.

    Args:
        source: of `block_of`.
        nbytes: how many of it.
        folder: where to.
        threads: how many.
        direct: past the page cache, into files whose place on the disk was taken before.

    Returns:
        None where the file system cannot do that directly, such as many a tmpfs.
    """
    paths = raw_paths(folder, threads)
    size, flags = (rounded(nbytes), os.O_DIRECT) if direct else (nbytes, 0)
    try:
        return timed(lambda: write_files(source, size, paths, flags))
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        return None
    finally:
        for path in paths:
            if os.path.exists(path):
                os.unlink(path)


def raw_paths(folder: str, count: int) -> list[str]:
    """Names of files that hold nothing but bytes."""
    return [os.path.join(folder, f"raw-{number}") for number in range(count)]


def write_files(source: mmap.mmap, nbytes: int, paths: Sequence[str], flags: int = 0) -> None:
    """Write one part of the bytes to each file, all at the same time, and sync them."""
    share = rounded(-(-nbytes // len(paths)))

    def write_part(number: int) -> None:
        start, end = min(nbytes, number * share), min(nbytes, (number + 1) * share)
        fd = os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o600)
        try:
            if flags & os.O_DIRECT and end > start:
                os.posix_fallocate(fd, 0, end - start)
            with memoryview(source) as memory:
                at = start
                while at < end:
                    with memory[at : min(end, at + _BLOCK)] as part:
                        at += os.pwrite(fd, part, at - start)
            os.fsync(fd)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(write_part, range(len(paths))))


def read_files(paths: Sequence[str], target: mmap.mmap, checksum: Checksum | None) -> float:
    """Seconds to read whole files one behind the other into memory that is there, maybe with their checksum.

    Args:
        paths: the files; larger ones are begun first.
        target: at least as large as all of them.
        checksum: taken of every part as soon as it is there.
    """
    sizes = sorted(((os.path.getsize(path), path) for path in paths), reverse=True)
    places, end = [], 0
    for size, path in sizes:
        places.append((path, end, end + size))
        end += size

    def read(place: tuple[str, int, int]) -> None:
        path, at, end = place
        with memoryview(target) as memory, open(path, "rb", buffering=0) as file:
            while at < end:
                with memory[at : min(end, at + _READ_BLOCK)] as part:
                    if file.readinto(part) != len(part):
                        raise OSError(f"{path} ended early.")
                    if checksum is not None:
                        checksum(part)
                    at += len(part)

    def read_all() -> None:
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read, places))

    return timed(read_all)
