"""`device_buffer_bytes`: memory on the device for one snapshot, taken by one copy in the order of the trainer's stream.

What lies there may be changed as soon as `save()` has returned: whatever the trainer gives its stream later comes
after the copy. From there it is drained into the arena beside training. One snapshot at a time lies in the buffer. A
save that finds it taken does without and copies under the fence: to wait for it on the stream would stop all work on
the device until the earlier snapshot has reached the host, and under the fence forward and backward go on.

The memory is taken once, when there is first something to put into it: as much as the tensors need, and at most
`device_buffer_bytes` on each device. It is taken anew only for a structure that needs more.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..image.layout import ITEM_ALIGNMENT
from ..memory.huge_pages import align
from .device_lane import CudaLane, Lane

logger = logging.getLogger(__name__)

_KEY = "checkpoint.stager.device_buffer_bytes"


@dataclass(frozen=True)
class _Place:
    """Where in its device's memory a tensor goes."""

    number: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    contiguous: bool


_Fit = dict[torch.device, list[_Place]]


class Placement:
    """Some tensors' places in the buffer's memory.

    Args:
        fit: their places, by device.
        lanes: one of each device.
        memory: the buffer's, by device.

    Attributes:
        fit: as given.
        numbers: the tensors that have a place.
    """

    def __init__(self, fit: _Fit, lanes: dict[torch.device, Lane], memory: dict[torch.device, torch.Tensor]) -> None:
        self.fit = fit
        self.numbers = frozenset(place.number for places in fit.values() for place in places)
        #: Per device its groups of (slots, numbers): torch has one kernel for tensors of one dtype that lie alike.
        self._groups: list[tuple[Lane, list[tuple[list[torch.Tensor], list[int]]]]] = []
        for device, places in fit.items():
            groups: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[int]]] = {}
            for place in places:
                slots, numbers = groups.setdefault((place.dtype, place.contiguous), ([], []))
                part = memory[device][place.start : place.start + place.nbytes]
                slots.append(part.view(place.dtype).view(place.shape))
                numbers.append(place.number)
            self._groups.append((lanes[device], list(groups.values())))

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the snapshot of those of `tensors` that have a place; they may be changed when this returns."""
        for lane, groups in self._groups:
            lane.fill([(slots, [tensors[number] for number in numbers]) for slots, numbers in groups])

    def drain(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy what lies in the buffer to those of `targets` that have its numbers; done on return."""
        for lane, groups in self._groups:
            for slots, numbers in groups:
                lane.drain([targets[number] for number in numbers], slots)


def cuda_device(tensor: torch.Tensor) -> torch.device | None:
    """The CUDA device that a tensor lies on, or None."""
    return tensor.device if tensor.is_cuda else None


class DeviceBuffer:
    """The buffer on all devices of this process, leased to one snapshot at a time.

    Args:
        limit: the most bytes that it takes of each device; 0: there is no buffer.
        device_of: the device of a tensor, or None for one that lies in host memory.
        lane: makes the copies of a device.
    """

    def __init__(
        self,
        limit: int,
        device_of: Callable[[torch.Tensor], torch.device | None] = cuda_device,
        lane: Callable[[torch.device], Lane] = CudaLane,
    ) -> None:
        self.device_of = device_of
        #: What the memory is divided into now, or None.
        self.current: Placement | None = None
        self._limit = limit
        self._lane = lane
        self._lanes: dict[torch.device, Lane] = {}
        self._memory: dict[torch.device, torch.Tensor] = {}
        #: Devices that had no room. They are not asked again: for every try torch gives back all that it keeps unused.
        self._full: set[torch.device] = set()
        self._lock = threading.Lock()
        self._leased = self._closed = False
        self._said: set[str] = set()

    def lease(self) -> Lease | None:
        """The buffer for one snapshot; None where there is no buffer, or an earlier snapshot still lies in it."""
        if not self._limit:
            return None
        with self._lock:
            if not self._leased and not self._closed:
                self._leased = True
                return Lease(self)
            closed = self._closed
        if not closed:
            self._say_once(
                f"{_KEY}: the snapshot before still lies in the buffer, so this one is copied under the fence, and so "
                "will be others that come as soon"
            )
        return None

    def close(self) -> None:
        """Free the memory, or have the lease that there still is free it when it ends."""
        with self._lock:
            self._closed = True
            if not self._leased:
                self._free()

    def _give_back(self) -> None:
        with self._lock:
            self._leased = False
            if self._closed:
                self._free()

    def _free(self) -> None:
        self.current = None
        self._memory.clear()
        self._lanes.clear()

    def _place(self, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> Placement | None:
        while True:
            fit = self._fit(tensors, order)
            if self.current is None or self.current.fit != fit:
                self.current = None  # its views would keep memory that is outgrown
                if not self._take_memory(fit):
                    continue  # a device turned out to be full
                self.current = Placement(fit, self._lanes, self._memory) if fit else None
                self._say_what_fits(tensors, order, fit)
            return self.current

    def _fit(self, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> _Fit:
        """As many tensors as the limit allows on each device, those that come first in `order` before others."""
        fit: _Fit = {}
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
                fit.setdefault(device, []).append(place)
        return fit

    def _take_memory(self, fit: _Fit) -> bool:
        """Have the memory that `fit` needs. False: a device has not as much, and is not asked again."""
        for device, places in fit.items():
            nbytes = max(1, places[-1].start + places[-1].nbytes)
            memory = self._memory.pop(device, None)
            if memory is None or memory.nbytes < nbytes:
                del memory  # before more is taken
                if device not in self._lanes:
                    self._lanes[device] = self._lane(device)
                try:
                    memory = self._lanes[device].memory(nbytes)
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
            self._memory[device] = memory
        return True

    def _say_what_fits(self, tensors: Sequence[torch.Tensor], order: Sequence[int], fit: _Fit) -> None:
        there: dict[torch.device, int] = defaultdict(int)
        for number in order:
            device = self.device_of(tensors[number])
            if device is not None:
                there[device] += tensors[number].nbytes
        if not there:
            self._say_once(f"{_KEY}={self._limit}: no tensor is on a CUDA device, so there is nothing to buffer")
        for device, places in fit.items():
            logger.info(
                "%s: %.2f of %.2f GB on %s go through the buffer, and the rest is copied under the fence",
                _KEY,
                sum(place.nbytes for place in places) / 1e9,
                there[device] / 1e9,
                device,
            )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.info(text)


class Lease:
    """The right of one snapshot to the buffer.

    Args:
        buffer: it is leased already.
    """

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer
        self._over = False

    def place(self, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> Placement | None:
        """Divide the buffer, and take its memory where that has not been done.

        Args:
            tensors: of the snapshot.
            order: numbers of those that may go into the buffer; the first ones before others, where not all fit.

        Returns:
            What goes into it, the same as before where nothing differs; None: nothing does.
        """
        return self._buffer._place(tensors, order)

    def give_back(self) -> None:
        """Nothing is copied out of the buffer any more; the second call does nothing."""
        if not self._over:
            self._over = True
            self._buffer._give_back()
