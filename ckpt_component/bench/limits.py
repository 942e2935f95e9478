"""What the hardware can do with the same bytes, measured in the same run."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

_BLOCK = 8 << 20


def measure_limits(state: dict[str, torch.Tensor], folder: str, repeats: int) -> dict[str, float]:
    """Seconds, medians of `repeats`: one memcpy, one multi-tensor copy, and raw durable writes by 1 and 2 threads."""
    total = sum(tensor.nbytes for tensor in state.values())
    source, target = torch.ones(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    tensors = list(state.values())
    memory = memoryview(target_bytes(source))
    figures: dict[str, list[float]] = {"memcpy": [], "foreach_copy": [], "raw write 1": [], "raw write 2": []}
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    for _ in range(repeats + 1):
        figures["memcpy"].append(_timed(lambda: target.copy_(source)))
        figures["foreach_copy"].append(_timed(lambda: torch._foreach_copy_(copies, tensors)))
    del copies
    for _ in range(repeats):
        for threads in (1, 2):
            figures[f"raw write {threads}"].append(_timed(lambda t=threads: _raw_write(memory, folder, t)))
    return {name: sorted(values)[len(values) // 2] for name, values in figures.items()}


def target_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a byte tensor."""
    from ..image.arena import tensor_bytes

    return tensor_bytes(tensor)


def _timed(call: object) -> float:
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started


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
