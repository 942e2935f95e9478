"""Copies into an arena: by a few threads from host memory, and by a side stream from CUDA devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from .host_copy import copy_on_host


class DeviceCopies:
    """The side streams of one stager, one per CUDA device, and the copies that run on them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.cuda.Event]:
        """Copy what lies in CPU memory now, and start the copies from CUDA devices.

        A side stream first waits for what the trainer's current stream has been given so far, so that the copies see
        finished values; `record_stream` keeps the sources' memory from being handed out again before they are done.

        Returns:
            One event per device; the copies from it are done when the event is.
        """
        if not slots:
            return []
        if not any(source.is_cuda for source in sources):
            copy_on_host(slots, sources, torch.get_num_threads())
            return []
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for slot, source in zip(slots, sources, strict=True):
            by_device[source.device][0].append(slot)
            by_device[source.device][1].append(source)
        events = [self._start_on(device, *pair) for device, pair in by_device.items() if device.type == "cuda"]
        for device, (targets, values) in by_device.items():
            if device.type != "cuda":
                copy_on_host(targets, values, torch.get_num_threads())
        return events

    def _start_on(
        self, device: torch.device, targets: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.cuda.Event:
        with torch.cuda.device(device):
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch._foreach_copy_(targets, values, non_blocking=True)
                for value in values:
                    value.record_stream(stream)
                event = torch.cuda.Event()
                event.record(stream)
        return event


def cuda_device_of(sources: Sequence[torch.Tensor]) -> torch.device | None:
    """The first CUDA device among the sources, or None on a CPU job; makes no CUDA call."""
    return next((source.device for source in sources if source.device.type == "cuda"), None)
