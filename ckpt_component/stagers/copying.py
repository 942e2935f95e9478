"""Copies into an arena: by a few threads from host memory, and by a side stream from CUDA devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

from ..image.copy import HostCopy, Portions
from ..image.copy_progress import Reached


class ArenaCopies:
    """What one stager copies into its arenas: planned once per arena and structure; a side stream per CUDA device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._plans: dict[Hashable, CopyPlan] = {}

    def plan(
        self,
        arena: Hashable,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        tracks: Sequence[tuple[int, int]] = (),
    ) -> CopyPlan:
        """How to copy into these slots.

        Args:
            arena: its number, and what else tells plans for it apart.
            slots: the list that the arena gives for the structure; another list, another plan.
            sources: tensors of that structure.
            tracks: the same for the same slots; see `HostCopy`.
        """
        known = self._plans.get(arena)
        if known is None or known.slots is not slots:
            known = self._plans[arena] = CopyPlan(slots, sources, self._streams, tracks)
        return known

    def forget(self) -> None:
        """Let go of the arenas' memory."""
        self._plans.clear()


class CopyPlan:
    """Which slots are filled from host memory and which from which device.

    Args:
        slots: as `ArenaCopies.plan`.
        sources: as there.
        streams: side streams by device; more are added where they are needed.
        tracks: as there.

    Attributes:
        device: the first CUDA device among the sources, or None on a CPU job.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        streams: dict[torch.device, torch.cuda.Stream],
        tracks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.slots = slots
        self._streams = streams
        self._numbers: dict[torch.device, list[int]] = defaultdict(list)
        on_host: list[int] = []
        for number, source in enumerate(sources):
            (self._numbers[source.device] if source.is_cuda else on_host).append(number)
        self.device = next(iter(self._numbers), None)
        self._on_host = on_host if self._numbers else None  # None: all of them
        self._host = HostCopy(self._picked(slots), self._picked(sources), tracks)

    def start(
        self,
        sources: Sequence[torch.Tensor],
        addresses: torch.Tensor | None = None,
        reached: Reached | None = None,
    ) -> tuple[Portions, list[torch.cuda.Event]]:
        """Start the copies from CUDA devices, and lay out those from host memory.

        A side stream first waits for what the trainer's current stream has been given so far, so that the copies see
        finished values; `record_stream` keeps the sources' memory from being handed out again before they are done.

        Args:
            sources: what is copied.
            addresses: where the memory of each source begins (int64), where that is known.
            reached: see `HostCopy.begin`. It is told nothing where devices have a part: their copies are over at once,
                next to what a disk takes.

        Returns:
            The host's copies, yet to be done; and an event per device, after which the copies from it are done.
        """
        events = [
            self._start_on(device, [self.slots[n] for n in numbers], [sources[n] for n in numbers])
            for device, numbers in self._numbers.items()
        ]
        if addresses is not None and self._on_host is not None:
            addresses = addresses[self._on_host]
        return self._host.begin(self._picked(sources), addresses, None if self._numbers else reached), events

    def _picked(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return tensors if self._on_host is None else [tensors[number] for number in self._on_host]

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


def copy_now(plan: CopyPlan, sources: Sequence[torch.Tensor], addresses: torch.Tensor | None = None) -> None:
    """Copy everything; done on return. The arguments are those of `CopyPlan.start`."""
    portions, events = plan.start(sources, addresses)
    portions.finish(torch.get_num_threads())
    for event in events:
        event.synchronize()
