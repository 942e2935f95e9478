"""Arenas: host memory for images, one block each.

A shared arena is a memfd: it leaks no name in /dev/shm, is not limited by a container's size of /dev/shm, and needs one
descriptor per run instead of one per tensor. It is page-locked, once, when CUDA tensors are copied into it.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from ...errors import CheckpointError
from ...state.tensors import column_of
from ..pages import SharedPages, align, map_private
from .layout import Layout

logger = logging.getLogger("ckpt_component.image")

#: Numbers by which the writer process identifies arenas.
_numbers = itertools.count(1)


class Slots(Sequence[torch.Tensor]):
    """The slots of a layout's items in an arena: addresses are computed at once, tensors on demand.

    Copies of small tensors in host memory need only the addresses, and creating a tensor takes microseconds and a
    kilobyte.

    Args:
        slab: the arena's bytes
        layout: layout of the image in the arena

    Attributes:
        layout: as given
        addresses: addresses of the payloads, int64
        sizes: sizes of the payloads in bytes, int64
        plans: a cache of copy plans for the stager, by its own keys
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
        self.plans, self._slab, self._tensors = {}, torch.empty(0, dtype=torch.uint8, device="cpu"), []


class Arena:
    """One block of host memory holding a rank's image; freed with this object, or before by `close`.

    Args:
        nbytes: size in bytes; rounded up to whole pages
        shared: whether another process must be able to map it
        allocated: False: `allocate` must be called before it is used
        available: bytes of memory that are known to be available; None: look, which others delay who allocate

    Attributes:
        memory: the block as bytes; empty once the arena is closed
        slab: the block as a tensor
        reusable: False: another process may still read an image in it, so it must not be filled again
        awaited: such a process is known, and `reusable` becomes True when it no longer reads

    Raises:
        CheckpointError: there is not enough memory
    """

    lasting = True

    def __init__(self, nbytes: int, *, shared: bool, allocated: bool = True, available: int | None = None) -> None:
        self.number = next(_numbers)
        self.nbytes = align(max(nbytes, 1))
        self.closed = False
        self.reusable, self.awaited = True, False
        self.fd: int | None = None
        self._pages: SharedPages | None = None
        self._locked = False
        self._slots: Slots | None = None
        try:
            # Check first: reserving more than is available does not fail but triggers the OOM killer.
            available = psutil.virtual_memory().available if available is None else available
            if self.nbytes > available:
                raise OSError(f"{available / 1e9:.2f} GB are available")
            if shared:
                self._pages = SharedPages(self.nbytes)
                self.fd, self.memory = self._pages.fd, self._pages.memory
                self._close_fd = weakref.finalize(self, os.close, self.fd)
                self._close_fd.atexit = False
            else:
                self.memory = memoryview(map_private(self.nbytes))
        except OSError as error:
            self.close()
            raise self._refused(error) from error
        self.slab = torch.frombuffer(self.memory, dtype=torch.uint8)
        if allocated:
            try:
                self.allocate(torch.get_num_threads())
            except BaseException:
                self.close()
                raise

    def allocate(self, threads: int, share: float = 1.0) -> None:
        """Allocate the missing pages of a shared arena. Threads may call this together; all return at the end.

        Args:
            threads: how many threads may clear pages
            share: of its time that each works

        Raises:
            CheckpointError: there is not enough memory
        """
        pages = self._pages
        if pages is None:
            return
        try:
            not_huge = pages.allocate(threads, share)
        except OSError as error:
            raise self._refused(error) from error
        if not_huge and self._pages is not None:
            logger.info("the checkpoint arena is not entirely in huge pages: %s", os.strerror(not_huge))
        self._pages = None

    def stop_allocating(self) -> None:
        """Let `allocate` return early in all threads; the arena must then be closed."""
        if self._pages is not None:
            self._pages.stop()

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"A checkpoint arena of {self.nbytes / 1e9:.2f} GB of host memory cannot be reserved ({error}); use "
            "checkpoint/stager=none with checkpoint/caller=inline, or fewer arenas."
        )

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The bytes [start, end) of the image, for an in-process writer; see `ByteSource.buffers`."""
        return [self.memory[start:end]]

    def slots(self, layout: Layout) -> Slots:
        """The slots of a layout. When the layout changes, its fixed bytes are written first."""
        slots = self._slots
        if slots is None or slots.layout is not layout:
            for position, data in layout.fixed_parts():
                self.memory[position : position + len(data)] = data
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
        self.slab, self.memory = torch.empty(0, dtype=torch.uint8, device="cpu"), memoryview(b"")
        self._pages = None
        if self.fd is not None:
            self._close_fd()
            self.fd = None

    def shared_descriptor(self) -> int:
        """The descriptor of the memory, for another process or owner to duplicate; the arena keeps it.

        Raises:
            CheckpointError: the arena is closed or not shared
        """
        if self.fd is None:
            raise CheckpointError("This checkpoint arena is closed, or was not made to be shared with other processes.")
        return self.fd
