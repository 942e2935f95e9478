"""The copies into and out of a device buffer, on one CUDA device: what runs on which stream, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

#: So many copies to the host are started at a time: a stream with a full queue holds up whoever starts work.
_STARTED = 512


class Lane(Protocol):
    """Copies into and out of the buffer's memory on one device."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Bytes on the device; torch.OutOfMemoryError where there are not as many."""
        ...

    def fill(self, groups: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Start to copy tensors into slots, before anything that the trainer gives the device from now on."""
        ...

    def drain(self, targets: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copy slots to host memory, after `fill`; done on return. Called by another thread than the trainer's."""
        ...


class CudaLane:
    """A side stream of a CUDA device.

    The memory belongs to the side stream, so that the caching allocator orders its reuse by that stream alone: it
    waits for every fill, and a fill waits for it.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Lane`."""
        # Outside of inference mode: a tensor made in it could not be written to later.
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def fill(self, groups: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """See `Lane`."""
        with torch.cuda.device(self._device):
            trainer = torch.cuda.current_stream(self._device)
            trainer.wait_stream(self._stream)
            for slots, values in groups:
                torch._foreach_copy_(slots, values, non_blocking=True)
                for value in values:  # it may belong to another stream, on which its memory could be handed out again
                    value.record_stream(trainer)
            self._stream.wait_stream(trainer)

    def drain(self, targets: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            for first in range(0, len(slots), _STARTED):
                some = slice(first, first + _STARTED)
                torch._foreach_copy_(list(targets[some]), list(slots[some]), non_blocking=True)
                copied = torch.cuda.Event(blocking=True)  # one that does not spin on a core while it is waited for
                copied.record(self._stream)
                copied.synchronize()
