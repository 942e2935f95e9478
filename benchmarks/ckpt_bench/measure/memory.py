"""Peak memory of this process and its descendants."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_PERIOD_S = 0.02


def pss_of_tree() -> int:
    """Proportional set size, in bytes, of this process and its descendants; shared pages count once."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _parent(int(name))
            if parent is not None:
                parents.setdefault(parent, []).append(int(name))
    waiting, total = [os.getpid()], 0
    while waiting:
        process = waiting.pop()
        waiting += parents.get(process, [])
        total += pss(process)
    return total


class Peak:
    """The highest value sampled."""

    def __init__(self) -> None:
        self.nbytes = 0


@contextmanager
def sampled_peak() -> Iterator[Peak]:
    """Sample the memory of the process tree. Sampling slows everything down, so measure no times during it."""
    peak, over = Peak(), threading.Event()

    def sample() -> None:
        while True:
            peak.nbytes = max(peak.nbytes, pss_of_tree())
            if over.wait(_PERIOD_S):
                return

    thread = threading.Thread(target=sample, name="bench-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


@contextmanager
def device_peak(device: str) -> Iterator[Peak]:
    """Peak memory of torch on the CUDA device, minus what it had before; 0 on the CPU."""
    peak = Peak()
    if device != "cuda":
        yield peak
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield peak
    torch.cuda.synchronize()
    peak.nbytes = torch.cuda.max_memory_allocated() - before


def _parent(process: int) -> int | None:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may contain spaces; the parent is the second field after it.
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def pss(process: int) -> int:
    """Proportional set size of one process, in bytes; 0 when it has ended."""
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # it has ended
        pass
    return 0
