"""Host memory for images: one block per arena, leased to one save at a time.

A memfd when another process must see it: no name in /dev/shm to leak, no container limit on /dev/shm, one descriptor
for a run and not one per tensor. Page-locked, once, when CUDA tensors are copied into it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time

import psutil
import torch

from ..errors import CheckpointError, CheckpointTimeoutError
from ..memory.huge_pages import PAGE, align, allocate_pages, map_private, map_shared
from ..memory.libc import memory_at
from .layout import Layout
from .slots import Slots

logger = logging.getLogger(__name__)

#: Numbers tell arenas apart towards a writer process; no state is shared through them.
_numbers = itertools.count(1)


class Arena:
    """One block of host memory holding a rank's image.

    Args:
        nbytes: size; rounded up to whole pages.
        shared: another process must be able to map it.

    Raises:
        CheckpointError: the memory is not to be had.
    """

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.number = next(_numbers)
        self.nbytes = align(max(nbytes, 1), PAGE)
        self.fd: int | None = None
        self._memory: memoryview | None = None
        self._locked = False
        # Asked beforehand: reserving more than there is does not fail, it has the kernel kill processes.
        available = psutil.virtual_memory().available
        if self.nbytes > available:
            raise CheckpointError(
                f"A checkpoint arena needs {self.nbytes / 1e9:.2f} GB of host memory and {available / 1e9:.2f} GB are "
                "available; use checkpoint/stager=none with checkpoint/caller=inline, or fewer arenas."
            )
        try:
            if shared:
                self.fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, self.nbytes)
                self._memory = map_shared(self.fd, self.nbytes)
                allocate_pages(self._memory, self.fd, torch.get_num_threads())
            else:
                self._memory = memoryview(map_private(self.nbytes))
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"{self.nbytes / 1e9:.2f} GB of host memory for a checkpoint arena could not be reserved ({error}); "
                "use checkpoint/stager=none with checkpoint/caller=inline, or fewer arenas."
            ) from error
        self.slab = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._slots = Slots(self.slab, [], [])

    @property
    def memory(self) -> memoryview:
        """The block as bytes; valid as long as the arena.

        Raises:
            CheckpointError: the arena is closed.
        """
        if self._memory is None:
            raise CheckpointError("This checkpoint arena is closed; build a new checkpointer.")
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._memory is None

    def slots(self, layout: Layout) -> Slots:
        """A destination tensor for every item of the layout; fixed bytes are put in when the layout changes."""
        if self._layout is not layout:
            block = self.memory
            for position, data in layout.fixed_parts():
                block[position : position + len(data)] = data
            starts = [layout.files[item.file].base + item.payload for item in layout.items]
            self._slots = Slots(self.slab, starts, [layout.stored[item.stored] for item in layout.items])
            self._layout = layout
        return self._slots

    def page_lock(self, device: torch.device) -> None:
        """Register the block with CUDA, once, so that copies from `device` run at full speed and in the background."""
        if self._locked:
            return
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(self.slab.data_ptr(), self.nbytes, 1)
        if int(code) != 0:
            logger.warning(
                "the checkpoint arena of %.2f GB could not be page-locked (CUDA error %d); copies are slower",
                self.nbytes / 1e9,
                int(code),
            )
            return
        self._locked = True

    def close(self) -> None:
        """Give the memory back; the views that `slots` gave must not be used any more."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self.slab.data_ptr())
            self._locked = False
        self._slots.release()
        self._layout = None
        # The mapping goes with the last tensor or view that looks into it.
        self.slab = torch.empty(0, dtype=torch.uint8)
        self._memory = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def shared_descriptor(self) -> int:
        """A descriptor of the memory, for another process or owner; it stays the arena's.

        Raises:
            CheckpointError: the arena is closed, or its memory is this process's alone.
        """
        if self.fd is None:
            raise CheckpointError("This checkpoint arena is closed, or was not made to be shared with other processes.")
        return self.fd


class ArenaPool:
    """Up to `count` arenas, each leased to one save and never written while it is.

    Args:
        count: how many saves may be in flight.
        shared: see `Arena`.
    """

    def __init__(self, count: int, *, shared: bool) -> None:
        self._count = count
        self._shared = shared
        self._free: list[Arena] = []
        self._leased = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def busy(self) -> bool:
        """Whether `lease` would have to wait."""
        with self._changed:
            return self._leased >= self._count

    @property
    def idle_bytes(self) -> int:
        """The memory of arenas that no save has."""
        with self._changed:
            return sum(arena.nbytes for arena in self._free)

    def wait_free(self, deadline: float) -> bool:
        """Wait until `lease` would not have to. Returns False when it still would at `deadline` (monotonic seconds)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._leased < self._count, timeout=max(deadline - time.monotonic(), 0)
            )

    def lease(self, nbytes: int, timeout: float) -> Arena:
        """An arena of at least `nbytes`, for the caller alone until `give_back`.

        Raises:
            CheckpointTimeoutError: all arenas stayed busy for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._leased >= self._count:
                if not self._changed.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    raise CheckpointTimeoutError(
                        f"All {self._count} checkpoint arena(s) were still being written after {timeout:g} s "
                        "(timeouts.stage); save less often, or raise checkpoint.stager.arenas."
                    )
            self._leased += 1
            fitting = next((arena for arena in self._free if arena.nbytes >= nbytes), None)
            if fitting is not None:
                self._free.remove(fitting)
                return fitting
            outgrown = self._free.pop() if self._free and self._leased + len(self._free) > self._count else None
        try:
            if outgrown is not None:
                outgrown.close()
            return Arena(nbytes, shared=self._shared)
        except BaseException:
            with self._changed:
                self._leased -= 1
                self._changed.notify()
            raise

    def give_back(self, arena: Arena) -> None:
        """End a lease: the save was committed or given up."""
        with self._changed:
            self._leased -= 1
            if self._closed:
                arena.close()
            else:
                self._free.append(arena)
            self._changed.notify()

    def close(self) -> None:
        """Free what is not leased now, and the rest when it comes back."""
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().close()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy; the view keeps the tensor alive."""
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
