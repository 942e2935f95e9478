"""The hardware limits for the bytes of a state."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....storage.checksum import ALGORITHMS, ChecksumMissingError, find_checksum
from .files import drop_cache, fill_cache
from .raw import Checksum, block_of, copy, median, raw_paths, read_files, timed, write, write_files
from .states import State, nbytes_of

#: What is read back are so many files.
_FILES = 2


def checksums() -> dict[str, Checksum]:
    """The checksums at hand by name: `crc32` always, others where they are installed."""
    found: dict[str, Checksum] = {}
    for name in ALGORITHMS:
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
        cold: whether cold reads can be distinguished from cached ones here.

    Returns:
        `memcpy` (one warm block), `foreach_copy` (tensor by tensor), `write_1`, `write_2` (buffered and synced, by so
        many threads to a file each), `direct_1`, `direct_2`, `direct_4` (O_DIRECT, preallocated, synced), `read_warm`
        and `read_cold` (into memory that is there), the same with a checksum as `read_crc32_warm` and so on, `fork`,
        `update`, and `update_after_fork`. None for what the target cannot do. For a state on a CUDA device
        `d2h` (one block into page-locked memory) and `d2h_foreach` (tensor by tensor) in place of those of `fork`.
    """
    nbytes = nbytes_of(state)
    tensors = list(state.values())
    source, target = block_of(nbytes), block_of(nbytes)
    on_device = tensors[0].is_cuda
    copies = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]
    calls: dict[str, Callable[[], float | None]] = {
        "memcpy": lambda: copy(source, target),
        "write_1": lambda: write(source, nbytes, folder, 1, direct=False),
        "foreach_copy": lambda: timed(lambda: torch._foreach_copy_(copies, tensors), on_device),
        "write_2": lambda: write(source, nbytes, folder, 2, direct=False),
        "direct_1": lambda: write(source, nbytes, folder, 1, direct=True),
        "direct_2": lambda: write(source, nbytes, folder, 2, direct=True),
        "direct_4": lambda: write(source, nbytes, folder, 4, direct=True),
        "update": lambda: timed(lambda: torch._foreach_add_(tensors, 1), on_device),
    }
    if on_device:
        calls |= _device_to_host(tensors, nbytes)
    seconds: dict[str, list[float | None]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            seconds[name].append(call())
        # Two files of half the bytes.
        paths = raw_paths(folder, _FILES)
        try:
            write_files(source, nbytes, paths)
            for name, took in (*([] if on_device else _forked(tensors)), *_reads(paths, target, cold).items()):
                seconds.setdefault(name, []).append(took)
        finally:
            for path in filter(os.path.exists, paths):
                os.unlink(path)
    return {name: median(found[1:]) for name, found in seconds.items()} | {"state_bytes": nbytes}


def _device_to_host(tensors: list[torch.Tensor], nbytes: int) -> dict[str, Callable[[], float | None]]:
    """Copies from the CUDA device into page-locked memory, which nothing that stages can beat."""
    block = torch.ones(nbytes, dtype=torch.uint8, device=tensors[0].device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Slots of their own: in one block the tensors' bytes would have to be aligned to their dtypes.
    slots = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    return {
        "d2h": lambda: timed(lambda: pinned.copy_(block, non_blocking=True), True),
        "d2h_foreach": lambda: timed(lambda: torch._foreach_copy_(slots, tensors, non_blocking=True), True),
    }


def _reads(paths: list[str], target: mmap.mmap, cold: bool) -> dict[str, float | None]:
    """Read files whole, plain and with every checksum, from memory and from the disk."""
    ways: Mapping[str, Checksum | None] = {"read": None, **{f"read_{name}": sum_ for name, sum_ in checksums().items()}}
    found: dict[str, float | None] = {}
    for name, checksum in ways.items():
        found[f"{name}_cold"] = None
        if cold:
            for path in paths:
                drop_cache(path)
            found[f"{name}_cold"] = read_files(paths, target, checksum)
        for path in paths:
            fill_cache(path)
        found[f"{name}_warm"] = read_files(paths, target, checksum)
    return found


def _forked(tensors: list[torch.Tensor]) -> list[tuple[str, float]]:
    """What forking a process with this state costs, and the update after it, whose pages must all be copied."""
    waiting, release = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        # Nothing but system calls here: other threads' locks may never be released.
        os.close(release)
        os.read(waiting, 1)
        os._exit(0)
    fork = time.perf_counter() - started
    os.close(waiting)
    try:
        update = timed(lambda: torch._foreach_add_(tensors, 1))
    finally:
        os.close(release)
        os.waitpid(child, 0)
    return [("fork", fork), ("update_after_fork", update)]
