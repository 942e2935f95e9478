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

from ckpt_component.core.pages import map_private

Checksum = Callable[[memoryview], int]

_BLOCK = 8 << 20
#: Bytes read before their checksum is computed; small enough to stay in the CPU cache.
_READ_BLOCK = 1 << 20
#: Number of reading threads; each reads whole files.
_READERS = 2


def block_of(nbytes: int) -> mmap.mmap:
    """Page-aligned memory, as direct I/O needs, in huge pages if possible, and already touched."""
    block = map_private(rounded(nbytes))
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    return block


def rounded(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def timed(call: Callable[[], object], on_device: bool = False) -> float:
    """Seconds that a call takes, including the work that it queues on the CUDA device."""
    if on_device:
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_device:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def median(values: Sequence[float | None]) -> float | None:
    """The median of all values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def copy(source: mmap.mmap, target: mmap.mmap) -> float:
    """Seconds to copy one block to another, with all of torch's threads."""
    one, other = (torch.frombuffer(block, dtype=torch.uint8) for block in (source, target))
    return timed(lambda: other.copy_(one))


def write(source: mmap.mmap, nbytes: int, folder: str, threads: int, *, direct: bool) -> float | None:
    """Seconds to write and sync bytes, by several threads with a file each. The files are removed afterwards.

    Args:
        source: a block of `block_of`
        nbytes: how many of its bytes to write
        folder: where to write
        threads: number of threads
        direct: bypass the page cache and preallocate the files

    Returns:
        None if the file system has no direct I/O, as some tmpfs.
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
    """Names of the files for raw bytes."""
    return [os.path.join(folder, f"raw-{number}") for number in range(count)]


def write_files(source: mmap.mmap, nbytes: int, paths: Sequence[str], flags: int = 0) -> None:
    """Write one part of the bytes to each file, in parallel, and sync the files."""
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
    """Seconds to read whole files into mapped memory, optionally with their checksum.

    Args:
        paths: the files; larger ones are read first
        target: at least as large as all of them
        checksum: computed for every part right after it is read
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
