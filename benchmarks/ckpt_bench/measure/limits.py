"""The hardware limits for the bytes of a state."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ckpt_component.core.storage.checksum import ALGORITHMS, ChecksumMissingError, find_checksum

from .raw import Checksum, block_of, copy, median, raw_paths, read_files, timed, write, write_files
from .states import State, nbytes_of
from .target_files import drop_cache, fill_cache

#: Number of files that are read back.
_FILES = 2


def checksums() -> dict[str, Checksum]:
    """The available checksums by name: `crc32` always, others if their package is installed."""
    available: dict[str, Checksum] = {}
    for name in ALGORITHMS:
        try:
            available[name] = find_checksum(name).of
        except ChecksumMissingError:
            continue
    return available


def measure_limits(state: State, folder: str, turns: Iterable[int], cold: bool) -> Iterator[dict[str, Any]]:
    """Seconds for the bytes of a state, medians of a few rounds. A first one, which touches cold pages, is not counted.

    The limits are measured in turn, as copies and writes alternate in real saves: in a tight loop of copies, a copy is
    up to a third faster than after a write.

    Args:
        state: determines the sizes
        folder: where files are written; they are removed again
        turns: one for each round that is counted
        cold: whether cold reads can be distinguished from cached ones here

    Yields:
        After each round that is counted: `memcpy` (one warm block), `foreach_copy` (tensor by tensor), `write_1`,
        `write_2` (buffered and synced, by one or two threads with a file each), `direct_1`, `direct_2`, `direct_4`
        (O_DIRECT, preallocated, synced), `read_warm` and `read_cold` (into mapped memory), the same with a checksum as
        `read_crc32_warm` and so on, `fork`, `update`, and `update_after_fork`. None for what the target does not
        support. For a state on a CUDA device, `d2h` (one block into page-locked memory) and `d2h_foreach` (tensor by
        tensor) replace those of `fork`.
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
    for turn in itertools.chain((None,), turns):
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
        if turn is not None:
            yield {name: median(values[1:]) for name, values in seconds.items()} | {"state_bytes": nbytes}


def _device_to_host(tensors: list[torch.Tensor], nbytes: int) -> dict[str, Callable[[], float | None]]:
    """Copies from the CUDA device into page-locked memory: the upper bound for any staging."""
    block = torch.ones(nbytes, dtype=torch.uint8, device=tensors[0].device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Separate slots, because in one block each tensor's bytes would have to be aligned to its dtype.
    slots = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in tensors]
    return {
        "d2h": lambda: timed(lambda: pinned.copy_(block, non_blocking=True), True),
        "d2h_foreach": lambda: timed(lambda: torch._foreach_copy_(slots, tensors, non_blocking=True), True),
    }


def _reads(paths: list[str], target: mmap.mmap, cold: bool) -> dict[str, float | None]:
    """Read whole files, without and with each checksum, from the page cache and from the disk."""
    ways: Mapping[str, Checksum | None] = {"read": None, **{f"read_{name}": sum_ for name, sum_ in checksums().items()}}
    seconds: dict[str, float | None] = {}
    for name, checksum in ways.items():
        seconds[f"{name}_cold"] = None
        if cold:
            for path in paths:
                drop_cache(path)
            seconds[f"{name}_cold"] = read_files(paths, target, checksum)
        for path in paths:
            fill_cache(path)
        seconds[f"{name}_warm"] = read_files(paths, target, checksum)
    return seconds


def _forked(tensors: list[torch.Tensor]) -> list[tuple[str, float]]:
    """The cost of a fork with this state, and of the next update, which copies all pages."""
    waiting, release = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        # Only system calls here, because locks of other threads may never be released.
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
