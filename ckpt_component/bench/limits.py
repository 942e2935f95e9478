"""What the hardware can do with the same bytes, measured in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..image.arena import tensor_bytes

_BLOCK = 8 << 20


def measure_limits(state: dict[str, torch.Tensor], folder: str, steady: int) -> dict[str, float]:
    """Seconds, medians of `steady`: one memcpy, one multi-tensor copy, and raw durable writes by 1 and 2 threads.

    They take turns, as copies and writes do in a run of saves: a copy in a tight loop of copies is up to a third
    faster than one that comes after a write.
    """
    tensors = list(state.values())
    source = torch.ones(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    memory = tensor_bytes(source)
    target, targets = torch.zeros_like(source), [torch.zeros_like(tensor) for tensor in tensors]
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "raw write 1": lambda: _raw_write(memory, folder, 1),
        "foreach_copy": lambda: torch._foreach_copy_(targets, tensors),
        "raw write 2": lambda: _raw_write(memory, folder, 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(steady + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    # The first round, which meets cold pages, is left out.
    return {name: sorted(found[1:])[steady // 2] for name, found in seconds.items()}


def _raw_write(memory: memoryview, folder: str, threads: int) -> None:
    share = -(-memory.nbytes // threads)

    def write(number: int) -> None:
        path = os.path.join(folder, f"raw-{number}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        try:
            part = memory[number * share : (number + 1) * share]
            position = 0
            while position < part.nbytes:
                position += os.pwrite(fd, part[position : position + _BLOCK], position)
            os.fsync(fd)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))
    for number in range(threads):
        os.unlink(os.path.join(folder, f"raw-{number}"))
