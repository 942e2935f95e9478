"""What the hardware can do with the same bytes, measured in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..image.arena import tensor_bytes

_BLOCK = 8 << 20


def measure_limits(state: dict[str, torch.Tensor], folder: str, repeats: int) -> dict[str, float]:
    """Seconds, medians of `repeats`: one memcpy, one multi-tensor copy, and raw durable writes by 1 and 2 threads."""
    tensors = list(state.values())
    source = torch.ones(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    memory = tensor_bytes(source)
    limits = {
        "memcpy": _median(torch.Tensor.copy_, repeats, torch.zeros_like(source), source),
        "foreach_copy": _median(torch._foreach_copy_, repeats, [torch.zeros_like(t) for t in tensors], tensors),
    }
    for threads in (1, 2):
        limits[f"raw write {threads}"] = _median(_raw_write, repeats, memory, folder, threads)
    return limits


def _median(call: Callable[..., Any], repeats: int, *arguments: Any) -> float:
    """The median time of a call; the first one, which meets cold pages, is left out."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[repeats // 2]


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
