"""Copies between tensors in host memory, at the speed of the memory.

One multi-tensor copy is 1.3 to 1.8 times slower than one memcpy of the same bytes (measured on 592 tensors of 1.5 GB
and on 20,000 of 0.66 GB): small tensors are copied by one thread, and every larger one wakes up the threads of OpenMP.
So the work is cut into portions of a few megabytes, which a few threads take one after the other.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

#: Below this torch copies with one thread (its grain size), and a portion may hold many of them.
_SMALL_ELEMENTS = 32768
_PORTION_BYTES = 4 << 20


def copy_on_host(slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], threads: int) -> None:
    """Copy `sources` into `slots`, pairwise; done on return.

    Args:
        slots: contiguous tensors in CPU memory, each of its source's shape and dtype.
        sources: CPU tensors of any strides.
        threads: how many may copy at the same time, this one included.
    """
    work: deque[Callable[[], object]] = deque()
    odd_slots, odd_sources = _cut(slots, sources, work)

    def drain() -> None:
        with torch.no_grad():  # holds for one thread alone
            while True:
                try:
                    portion = work.popleft()
                except IndexError:
                    return
                portion()

    helpers = min(threads, len(work)) - 1
    if helpers < 1:
        drain()
    else:
        with ThreadPoolExecutor(helpers, thread_name_prefix="ckpt-copy") as pool:
            running = [pool.submit(drain) for _ in range(helpers)]
            drain()
        for done in running:
            done.result(timeout=0)
    if odd_slots:
        with torch.no_grad():
            torch._foreach_copy_(odd_slots, odd_sources)


def _cut(
    slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], work: deque[Callable[[], object]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Put portions into `work`; returns what only torch can copy and by all its threads: large and not contiguous."""
    odd_slots: list[torch.Tensor] = []
    odd_sources: list[torch.Tensor] = []
    small_slots: list[torch.Tensor] = []
    small_sources: list[torch.Tensor] = []
    elements = 0
    for slot, source in zip(slots, sources, strict=True):
        count = source.numel()
        if count < _SMALL_ELEMENTS:
            small_slots.append(slot)
            small_sources.append(source)
            elements += count
            if elements * 4 >= _PORTION_BYTES:
                work.append(partial(torch._foreach_copy_, small_slots, small_sources))
                small_slots, small_sources, elements = [], [], 0
        elif source.is_contiguous() and not source.is_conj() and not source.is_neg():
            target, origin, nbytes = slot.data_ptr(), source.data_ptr(), slot.nbytes
            for start in range(0, nbytes, _PORTION_BYTES):
                # ctypes gives up the GIL, and the C library's copy does not read what it is about to overwrite.
                work.append(
                    partial(ctypes.memmove, target + start, origin + start, min(_PORTION_BYTES, nbytes - start))
                )
        else:
            odd_slots.append(slot)
            odd_sources.append(source)
    if small_slots:
        work.append(partial(torch._foreach_copy_, small_slots, small_sources))
    return odd_slots, odd_sources
