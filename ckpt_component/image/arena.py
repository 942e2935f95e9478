"""Arenas: host memory for images, one block each, leased to one save at a time.

A shared arena is a memfd: it leaks no name in /dev/shm, is not limited by a container's size of /dev/shm, and needs one
descriptor per run instead of one per tensor. It is page-locked, once, when CUDA tensors are copied into it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import psutil
import torch

from ..errors import CheckpointError, CheckpointTimeoutError
from ..memory.huge_pages import align, allocate_shared, map_private
from ..memory.int_columns import column_of
from ..memory.libc import memory_at
from .items import around_payload
from .layout import Layout

logger = logging.getLogger(__name__)

#: Numbers by which the writer process identifies arenas.
_numbers = itertools.count(1)


class Slots(Sequence[torch.Tensor]):
    """The slots of a layout's items in an arena: addresses are computed at once, tensors on demand.

    Copies of small tensors in host memory need only the addresses, and creating a tensor takes microseconds and a
    kilobyte.

    Args:
        slab: the arena's bytes.
        layout: layout of the image in the arena.

    Attributes:
        layout: as given.
        addresses: addresses of the payloads, int64.
        sizes: sizes of the payloads in bytes, int64.
        plans: a cache of copy plans for the stager, by its own keys.
    """

    def __init__(self, slab: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        self.plans: dict[Any, Any] = {}
        self._starts = array("q", [layout.files[item.file].base + item.payload for item in layout.items])
        self._slab = slab
        self._tensors: list[torch.Tensor | None] = [None] * len(self._starts)
        self.addresses = column_of(self._starts) + slab.data_ptr()
        self.sizes = column_of(item.nbytes for item in layout.items)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        tensor = self._tensors[number]
        if tensor is None:
            entry, start = self.layout.stored[self.layout.items[number].stored], self._starts[number]
            tensor = self._slab[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)
            self._tensors[number] = tensor
        return tensor

    def release(self) -> None:
        """Drop all references to the arena's memory."""
        self.plans, self._slab, self._tensors = {}, torch.empty(0), []


class Arena:
    """One block of host memory holding a rank's image.

    Args:
        nbytes: size in bytes; rounded up to whole pages.
        shared: whether another process must be able to map it.

    Attributes:
        memory: the block as bytes; empty once the arena is closed.
        slab: the block as a tensor.

    Raises:
        CheckpointError: there is not enough memory.
    """

    lasting = True

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.number = next(_numbers)
        self.nbytes = align(max(nbytes, 1))
        self.closed = False
        self.fd: int | None = None
        self._locked = False
        self._slots: Slots | None = None
        try:
            # Check first: reserving more than is available does not fail but triggers the OOM killer.
            available = psutil.virtual_memory().available
            if self.nbytes > available:
                raise OSError(f"{available / 1e9:.2f} GB are available")
            if shared:
                self.fd, self.memory, not_huge = allocate_shared(self.nbytes, torch.get_num_threads())
                if not_huge:
                    logger.info("the checkpoint arena is not entirely in huge pages: %s", os.strerror(not_huge))
            else:
                self.memory = memoryview(map_private(self.nbytes))
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"A checkpoint arena of {self.nbytes / 1e9:.2f} GB of host memory cannot be reserved ({error}); use "
                "checkpoint/stager=none with checkpoint/caller=inline, or fewer arenas."
            ) from error
        self.slab = torch.frombuffer(self.memory, dtype=torch.uint8)

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The bytes [start, end) of the image, for an in-process writer; see `ByteSource.buffers`."""
        return [self.memory[start:end]]

    def slots(self, layout: Layout) -> Slots:
        """The slots of a layout. When the layout changes, its fixed bytes are written first."""
        slots = self._slots
        if slots is None or slots.layout is not layout:
            for position, data in layout.fixed_parts():
                self.memory[position : position + len(data)] = data
            around_payload.cache_clear()  # a kilobyte per shape, which only another arena would need again
            if slots is not None:
                slots.release()
            slots = self._slots = Slots(self.slab, layout)
        return slots

    def page_lock(self, device: torch.device) -> None:
        """Register the block with CUDA, once, so that copies from `device` are asynchronous and run at full speed."""
        if self._locked:
            return
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self.slab.data_ptr(), self.nbytes, 1))
        self._locked = code == 0
        if not self._locked:
            logger.warning(
                "the checkpoint arena of %.2f GB could not be page-locked (CUDA error %d); copies are slower",
                self.nbytes / 1e9,
                code,
            )

    def close(self) -> None:
        """Free the memory; the result of `slots` must not be used any more."""
        self.closed = True
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self.slab.data_ptr())
            self._locked = False
        if self._slots is not None:
            self._slots.release()
            self._slots = None
        # The block is unmapped with the last tensor or view of it.
        self.slab, self.memory = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def shared_descriptor(self) -> int:
        """The descriptor of the memory, for another process or owner to duplicate; the arena keeps it.

        Raises:
            CheckpointError: the arena is closed or not shared.
        """
        if self.fd is None:
            raise CheckpointError("This checkpoint arena is closed, or was not made to be shared with other processes.")
        return self.fd


class ArenaPool:
    """Up to `count` arenas, each leased to one save at a time.

    Args:
        count: how many saves may be in flight.
        shared: see `Arena`.
    """

    def __init__(self, count: int, *, shared: bool) -> None:
        self._count = count
        self._shared = shared
        self._free: list[Arena] = []
        self._leased = 0
        self._leased_bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def idle_bytes(self) -> int:
        """Total size of the arenas that are not leased."""
        with self._changed:
            return sum(arena.nbytes for arena in self._free)

    @property
    def nbytes(self) -> int:
        """Total size of all arenas."""
        with self._changed:
            return self._leased_bytes + sum(arena.nbytes for arena in self._free)

    def wait_free(self, deadline: float) -> bool:
        """Wait until `lease` would not block; returns False if `deadline` (monotonic seconds) passes first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._leased < self._count, timeout=max(deadline - time.monotonic(), 0)
            )

    def lease(self, nbytes: int, timeout: float) -> Arena:
        """Lease an arena of at least `nbytes` for exclusive use until `give_back`.

        Raises:
            CheckpointTimeoutError: all arenas stayed busy for `timeout` seconds.
        """
        with self._changed:
            if self._leased >= self._count and not self.wait_free(time.monotonic() + timeout):
                raise CheckpointTimeoutError(
                    f"All {self._count} checkpoint arena(s) were still being written after {timeout:g} s "
                    "(timeouts.stage); save less often, or raise checkpoint.stager.arenas."
                )
            self._leased += 1
            for arena in self._free:
                if arena.nbytes >= nbytes:
                    self._free.remove(arena)
                    self._leased_bytes += arena.nbytes
                    return arena
            small_arena = self._free.pop() if self._free and self._leased + len(self._free) > self._count else None
        try:
            if small_arena is not None:
                small_arena.close()
            arena = Arena(nbytes, shared=self._shared)
        except BaseException:
            with self._changed:
                self._leased -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._leased_bytes += arena.nbytes
        return arena

    def give_back(self, arena: Arena, staged: Future[None] | None = None) -> None:
        """End a lease after the save was committed or given up. Can be used as a callback of the copy's future."""
        with self._changed:
            self._leased -= 1
            self._leased_bytes -= arena.nbytes
            if self._closed:
                arena.close()
            else:
                self._free.append(arena)
            self._changed.notify()

    def close(self) -> None:
        """Free the arenas that are not leased now, and the others when they are given back."""
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().close()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy; the view keeps the tensor alive."""
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
