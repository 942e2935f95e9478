"""`device_buffer_bytes`: device memory for one snapshot, filled by a copy on the trainer's stream.

Tensors in the buffer may be changed as soon as `save()` has returned, because later work on the stream runs after the
copy. The buffer is drained into the arena in the background. It holds one snapshot at a time. A save that finds it in
use copies under the fence instead: waiting for it on the stream would stop all work on the device until the earlier
snapshot has reached the host, whereas forward and backward continue under the fence.

The memory is allocated on first use: as much as the tensors need, and at most `device_buffer_bytes` on each device. It
is allocated again only for a structure that needs more.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..core.formats.zip_records import ITEM_ALIGNMENT
from ..core.memory.huge_pages import align

logger = logging.getLogger(__name__)

_KEY = "checkpoint.stager.device_buffer_bytes"
#: How many copies to the host are started at a time: a stream with a full queue blocks the thread that adds work.
_STARTED = 512

#: Slots in the buffer, and the numbers of the tensors that go there.
_Group = tuple[list[torch.Tensor], list[int]]


class CudaLane:
    """Copies into and out of the device buffer of a CUDA device, on the right streams and in the right order.

    The memory belongs to a side stream, so that the caching allocator orders its reuse by that stream only. The side
    stream waits for every fill, and a fill waits for the side stream.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes on the device. Raises torch.OutOfMemoryError if there are not enough."""
        # Outside of inference mode, because an inference tensor could not be written to later.
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def fill(self, groups: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Start to copy tensors into slots, before any work that the trainer queues from now on."""
        with torch.cuda.device(self._device):
            trainer = torch.cuda.current_stream(self._device)
            trainer.wait_stream(self._stream)
            for slots, values in groups:
                torch._foreach_copy_(slots, values, non_blocking=True)
                for value in values:  # it may belong to another stream, which could reuse its memory
                    value.record_stream(trainer)
            self._stream.wait_stream(trainer)

    def drain(self, targets: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copy slots to host memory, after `fill`; done on return. May run on any thread."""
        with torch.cuda.stream(self._stream):
            for first in range(0, len(slots), _STARTED):
                some = slice(first, first + _STARTED)
                torch._foreach_copy_(list(targets[some]), list(slots[some]), non_blocking=True)
                copied = torch.cuda.Event(blocking=True)  # waiting does not spin on a core
                copied.record(self._stream)
                copied.synchronize()


class _Place(NamedTuple):
    """Where a tensor goes in the memory of its device."""

    number: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    contiguous: bool


_Places = dict[torch.device, list[_Place]]


def cuda_device(tensor: torch.Tensor) -> torch.device | None:
    """Return the CUDA device of a tensor, or None."""
    return tensor.device if tensor.is_cuda else None


class DeviceBuffer:
    """The buffer on all devices of this process, held by one snapshot at a time.

    Args:
        limit: most bytes on each device; 0: no buffer.
        device_of: returns the device of a tensor, or None for one in host memory.
        lane: makes the copies of a device.

    Attributes:
        numbers: numbers of the tensors that have a place in it; a new set whenever the memory is divided again.
    """

    def __init__(
        self,
        limit: int,
        device_of: Callable[[torch.Tensor], torch.device | None] = cuda_device,
        lane: Callable[[torch.device], CudaLane] = CudaLane,
    ) -> None:
        self.device_of = device_of
        self.numbers: frozenset[int] = frozenset()
        self._limit = limit
        self._make_lane = lane
        self._lanes: dict[torch.device, CudaLane] = {}
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._places: _Places = {}
        #: Grouped by dtype and contiguity: torch copies such a group with one kernel.
        self._groups: dict[torch.device, list[_Group]] = {}
        #: Devices without enough memory. They are not tried again, because each try makes torch free its whole cache.
        self._full: set[torch.device] = set()
        self._lock = threading.Lock()
        self._held = self._closed = False
        self._logged: set[str] = set()

    def acquire(self) -> bool:
        """Acquire the buffer for one snapshot. False if there is none, or it still holds an earlier snapshot."""
        if not self._limit:
            return False
        with self._lock:
            if not self._held and not self._closed:
                self._held = True
                return True
            closed = self._closed
        if not closed:
            self._log_once(
                f"{_KEY}: the previous snapshot is still in the buffer, so this one is copied under the fence, as will "
                "be others that follow as soon"
            )
        return False

    def release(self) -> None:
        """Release the buffer once the copy out of it has ended; call once for each `acquire`."""
        with self._lock:
            self._held = False
            if self._closed:
                self._free()

    def close(self) -> None:
        """Free the memory now, or in `release` if the buffer is in use."""
        with self._lock:
            self._closed = True
            if not self._held:
                self._free()

    def place(self, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> frozenset[int]:
        """Divide the buffer, and allocate its memory if necessary. Call only while the buffer is held.

        Args:
            tensors: the tensors of the snapshot.
            order: numbers of those that may go into the buffer, in order of preference.

        Returns:
            `numbers`.
        """
        if all(self.device_of(tensors[number]) is None for number in order):
            self._log_once(f"{_KEY}={self._limit}: no tensor is on a CUDA device, so there is nothing to buffer")
        places = self._fit(tensors, order)
        if places != self._places:
            self._divide({})  # first drop the views, so that outgrown memory can be freed
            for device, on_device in list(places.items()):
                if self._allocate(device, max(1, on_device[-1].start + on_device[-1].nbytes)):
                    text = "%s: %.2f GB on %s go through the buffer, and the rest is copied under the fence"
                    logger.info(text, _KEY, sum(place.nbytes for place in on_device) / 1e9, device)
                else:
                    del places[device]
            self._divide(places)
        return self.numbers

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors that have a place; they may be changed when this returns."""
        for device, groups in self._groups.items():
            self._lanes[device].fill([(slots, [tensors[number] for number in numbers]) for slots, numbers in groups])

    def drain(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy the buffer to the `targets` with its numbers; done on return."""
        for device, groups in self._groups.items():
            for slots, numbers in groups:
                self._lanes[device].drain([targets[number] for number in numbers], slots)

    def _free(self) -> None:
        self._divide({})
        self._memory.clear()
        self._lanes.clear()

    def _divide(self, places: _Places) -> None:
        self._places, self._groups = places, {}
        self.numbers = frozenset(place.number for on_device in places.values() for place in on_device)
        for device, on_device in places.items():
            groups: dict[tuple[torch.dtype, bool], _Group] = defaultdict(lambda: ([], []))
            for place in on_device:
                slots, numbers = groups[place.dtype, place.contiguous]
                part = self._memory[device][place.start : place.start + place.nbytes]
                slots.append(part.view(place.dtype).view(place.shape))
                numbers.append(place.number)
            self._groups[device] = list(groups.values())

    def _fit(self, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> _Places:
        """Choose as many tensors as the limit allows on each device, in the order of `order`."""
        places: _Places = {}
        used: dict[torch.device, int] = defaultdict(int)
        for number in order:
            tensor = tensors[number]
            device = self.device_of(tensor)
            if device is None or device in self._full:
                continue
            start = align(used[device], ITEM_ALIGNMENT)
            if start + tensor.nbytes <= self._limit:
                used[device] = start + tensor.nbytes
                place = _Place(number, start, tensor.nbytes, tensor.dtype, tensor.shape, tensor.is_contiguous())
                places.setdefault(device, []).append(place)
        return places

    def _allocate(self, device: torch.device, nbytes: int) -> bool:
        """Ensure that much memory on a device. False if the device has not enough; it is not tried again."""
        if device in self._memory and self._memory[device].nbytes >= nbytes:
            return True
        self._memory.pop(device, None)  # before more is allocated
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device)
        try:
            self._memory[device] = self._lanes[device].memory(nbytes)
        except torch.OutOfMemoryError as error:
            self._full.add(device)
            logger.warning(
                "%s: %s has no %.2f GB left for the buffer (%s), so its tensors are copied under the fence",
                _KEY,
                device,
                nbytes / 1e9,
                str(error).partition("\n")[0],
            )
            return False
        return True

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.info(text)
