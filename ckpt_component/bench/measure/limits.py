"""What the hardware can do with the same bytes: no serializing, no plan, no commit."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ...storage.checksum import PACKAGES, ChecksumMissingError, find_checksum
from .files import drop_cache, fill_cache
from .states import State, nbytes_of

_BLOCK = 8 << 20
#: So much is read before its checksum is taken: it is in the cache of the core then.
_READ_BLOCK = 1 << 20
#: Two threads, each with a file of its own, read back what is read.
_READERS = 2

Checksum = Callable[[memoryview], int]


def checksums() -> dict[str, Checksum]:
    """The checksums at hand by name: zlib's always, faster ones where they are installed."""
    found: dict[str, Checksum] = {}
    for name in PACKAGES:
        try:
            found[name] = find_checksum(name).of
        except ChecksumMissingError:
            continue
    return found


def measure_limits(state: State, folder: str, rounds: int, cold: bool) -> dict[str, Any]:
    """Seconds for the bytes of a state, medians of `rounds`; the first round, which meets cold pages, is left out.

    The limits take turns, as copies and writes do in a run of saves: a copy in a tight loop of copies is up to a
    third faster than one that comes after a write.

    Args:
        state: gives the sizes.
        folder: where files are written; it is as it was after.
        rounds: how often.
        cold: whether reads from the disk can be told from reads from memory here.

    Returns:
        `memcpy` (one warm block), `foreach_copy` (tensor by tensor), `write_1`, `write_2` (buffered and synced, by so
        many threads to a file each), `direct_1`, `direct_2`, `direct_4` (O_DIRECT, preallocated, synced), `read_warm`
        and `read_cold` (into memory that is there), the same with a checksum as `read_crc32_warm` and so on, `fork`,
        `update`, and `update_after_fork`. None for what the target cannot do. For a state on a CUDA device
        `d2h` (one block into page-locked memory) and `d2h_foreach` (tensor by tensor) in place of those of `fork`.
    """
    nbytes = nbytes_of(state)
    tensors = list(state.values())
    source, target = _block(nbytes), _block(nbytes)
    on_device = tensors[0].is_cuda
    copies = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]
    source_tensor, target_tensor = (torch.frombuffer(block, dtype=torch.uint8) for block in (source, target))
    calls: dict[str, Callable[[], float | None]] = {
        "memcpy": lambda: _timed(lambda: target_tensor.copy_(source_tensor)),
        "write_1": lambda: _write(source, nbytes, folder, 1),
        "foreach_copy": lambda: _timed(lambda: torch._foreach_copy_(copies, tensors), on_device),
        "write_2": lambda: _write(source, nbytes, folder, 2),
        "direct_1": lambda: _write_direct(source, nbytes, folder, 1),
        "direct_2": lambda: _write_direct(source, nbytes, folder, 2),
        "direct_4": lambda: _write_direct(source, nbytes, folder, 4),
        "update": lambda: _timed(lambda: torch._foreach_add_(tensors, 1), on_device),
    }
    if on_device:
        calls |= _device_to_host(tensors, nbytes)
    seconds: dict[str, list[float | None]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            seconds[name].append(call())
        for name, took in (
            *([] if on_device else _forked(tensors)),
            *_reads(source, target, nbytes, folder, cold).items(),
        ):
            seconds.setdefault(name, []).append(took)
    return {name: _median(found[1:]) for name, found in seconds.items()} | {"state_bytes": nbytes}


def _block(nbytes: int) -> mmap.mmap:
    """Memory that starts at a page, as direct I/O needs it, and is there already."""
    block = mmap.mmap(-1, _rounded(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    return block


def _rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _device_to_host(tensors: list[torch.Tensor], nbytes: int) -> dict[str, Callable[[], float | None]]:
    """Copies from the CUDA device into page-locked memory, which nothing that stages can beat."""
    block = torch.ones(nbytes, dtype=torch.uint8, device=tensors[0].device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Slots of their own: in one block the tensors' bytes would have to be aligned to their dtypes.
    slots = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    return {
        "d2h": lambda: _timed(lambda: pinned.copy_(block, non_blocking=True), True),
        "d2h_foreach": lambda: _timed(lambda: torch._foreach_copy_(slots, tensors, non_blocking=True), True),
    }


def _timed(call: Callable[[], object], on_device: bool = False) -> float:
    if on_device:
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_device:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _write(source: mmap.mmap, nbytes: int, folder: str, threads: int) -> float:
    return _timed_files(source, nbytes, folder, threads, 0)


def _write_direct(source: mmap.mmap, nbytes: int, folder: str, threads: int) -> float | None:
    try:
        return _timed_files(source, _rounded(nbytes), folder, threads, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None  # a file system without direct I/O, such as many a tmpfs


def _timed_files(source: mmap.mmap, nbytes: int, folder: str, threads: int, flags: int) -> float:
    """Write one part of the bytes per thread, sync, and remove; the removal is not on the clock."""
    try:
        return _timed(lambda: _write_files(source, nbytes, folder, threads, flags))
    finally:
        for path in _paths(folder, threads):
            if os.path.exists(path):
                os.unlink(path)


def _write_files(source: mmap.mmap, nbytes: int, folder: str, threads: int, flags: int) -> None:
    share = _rounded(-(-nbytes // threads))
    paths = _paths(folder, threads)

    def write(number: int) -> None:
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

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))


def _paths(folder: str, count: int) -> list[str]:
    return [os.path.join(folder, f"raw-{number}") for number in range(count)]


def _reads(source: mmap.mmap, target: mmap.mmap, nbytes: int, folder: str, cold: bool) -> dict[str, float | None]:
    """Read the bytes back by `_READERS` threads, plain and with every checksum, from memory and from the disk."""
    _write_files(source, nbytes, folder, _READERS, 0)
    paths = _paths(folder, _READERS)
    ways: Mapping[str, Checksum | None] = {"read": None, **{f"read_{name}": sum_ for name, sum_ in checksums().items()}}
    found: dict[str, float | None] = {}
    try:
        for name, checksum in ways.items():
            read = partial(_read_files, paths, target, nbytes, checksum)
            found[f"{name}_cold"] = None
            if cold:
                for path in paths:
                    drop_cache(path)
                found[f"{name}_cold"] = _timed(read)
            for path in paths:
                fill_cache(path)
            found[f"{name}_warm"] = _timed(read)
    finally:
        for path in paths:
            os.unlink(path)
    return found


def _read_files(paths: list[str], target: mmap.mmap, nbytes: int, checksum: Checksum | None) -> None:
    share = _rounded(-(-nbytes // len(paths)))

    def read(number: int) -> None:
        at, end = min(nbytes, number * share), min(nbytes, (number + 1) * share)
        with memoryview(target) as memory, open(paths[number], "rb", buffering=0) as file:
            while at < end:
                with memory[at : min(end, at + _READ_BLOCK)] as part:
                    if file.readinto(part) != len(part):
                        raise OSError(f"{paths[number]} ended early.")
                    if checksum is not None:
                        checksum(part)
                    at += len(part)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(read, range(len(paths))))


def _forked(tensors: list[torch.Tensor]) -> list[tuple[str, float]]:
    """What forking a process with this state costs, and the update after it, whose pages must all be copied."""
    waiting, release = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        # Nothing but system calls here: other threads' locks may be held for ever.
        os.close(release)
        os.read(waiting, 1)
        os._exit(0)
    fork = time.perf_counter() - started
    os.close(waiting)
    try:
        update = _timed(lambda: torch._foreach_add_(tensors, 1))
    finally:
        os.close(release)
        os.waitpid(child, 0)
    return [("fork", fork), ("update_after_fork", update)]


def _median(values: list[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None
