"""How `zero_overhead` divides a state: what is copied at once, what until the fence, what the device buffer takes.

What forward itself may change (buffers such as BatchNorm's) is copied at once, and what the optimizer alone changes may
wait. The device buffer takes what lies on its device, first that which training would have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..state.flatten import FlatState
from ..state.shards import local_parts
from .arena_stager import Filling
from .device_buffer import DeviceBuffer, Lease, Placement, cuda_device

#: Beside a device buffer, so much of host memory is copied at once: with PyTorch's optimizers the step counts lie
#: there, which then need no fence either.
_AT_ONCE_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """Some of the items: their numbers, and their slots."""

    numbers: list[int]
    slots: list[torch.Tensor]

    def of(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Their tensors."""
        return list(sources) if len(self.numbers) == len(sources) else [sources[number] for number in self.numbers]


@dataclass
class Division:
    """How a state is divided for one arena.

    Attributes:
        slots: the arena's, for one structure.
        pointers: where the tensors lay.
        late: for every tensor whether only an optimizer changes it.
        now: copied before `take` returns.
        later: copied beside training, until the fence.
        placement: those that the device buffer takes; None: it takes none.
        watched: numbers of the tensors that must not change before the fence.
        device: a CUDA device that some of the tensors lie on, or None.
    """

    slots: Sequence[torch.Tensor]
    pointers: Sequence[int]
    late: list[bool]
    now: Part
    later: Part
    placement: Placement | None
    watched: list[int]
    device: torch.device | None


class Divisions:
    """The divisions for a stager's arenas, each thought over again only when it could be another.

    Args:
        buffer: the device buffer.

    Attributes:
        optimizers: those that wait at the fence.
    """

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._buffer = buffer
        #: By the arena's number, and whether the device buffer had a part in it.
        self._known: dict[tuple[int, bool], Division] = {}

    def forget(self) -> None:
        """Let go of the arenas' and the buffer's memory, and think all over again."""
        self._known.clear()

    def of(self, filling: Filling, lease: Lease | None) -> Division:
        """How a state is divided for an arena; with a lease, the device buffer takes what it can."""
        flat = filling.flat
        pointers = flat.pointers
        key = filling.arena.number, lease is not None
        known = self._known.get(key)
        if (
            known is not None
            and known.slots is filling.slots
            and (lease is None or known.placement is self._buffer.current)
            and self._still_fits(known, flat, pointers)
        ):
            known.pointers = pointers
            return known
        late = self._changed_by_optimizers_alone(flat, pointers)
        made = self._known[key] = self._divide(filling, pointers, late, lease)
        return made

    def _divide(self, filling: Filling, pointers: Sequence[int], late: list[bool], lease: Lease | None) -> Division:
        layout, slots, sources = filling.layout, filling.slots, filling.sources
        tensor_of = layout.sources
        placement = None
        if lease is not None:
            # Of joined tensors one stands for all: whether each of them may be changed would be hard to tell.
            alone = (number for number in range(len(sources)) if number not in layout.windows)
            placement = lease.place(sources, sorted(alone, key=lambda number: late[tensor_of[number]]))
        at_once = set[int]() if placement is None else self._few_on_host(filling, late)
        now, later = Part([], []), Part([], [])
        free = set[int]()  # tensors that are not copied later although they are late
        for number, tensor in enumerate(tensor_of):
            held = placement is not None and number in placement.numbers
            if held or number in at_once:
                free.add(tensor)
            if not held:
                part = later if late[tensor] and number not in at_once else now
                part.numbers.append(number)
                part.slots.append(slots[number])
        structure = layout.structure
        watched = [
            number
            for number, is_late in enumerate(late)
            if is_late and structure.stored[structure.stored_of[number]].tensor not in free
        ]
        device = next(filter(None, map(cuda_device, sources)), None)
        return Division(slots, pointers, late, now, later, placement, watched, device)

    def _few_on_host(self, filling: Filling, late: list[bool]) -> set[int]:
        """The items in host memory that could wait, where they are so few that it is quicker not to."""
        layout, sources = filling.layout, filling.sources
        on_host = {
            number
            for number, tensor in enumerate(layout.sources)
            if late[tensor] and number not in layout.windows and self._buffer.device_of(sources[number]) is None
        }
        few = sum(sources[number].nbytes for number in on_host) <= _AT_ONCE_BYTES
        return on_host if few else set()

    def _still_fits(self, known: Division, flat: FlatState, pointers: Sequence[int]) -> bool:
        """Whether no tensor that moved, such as an RNG state made anew for every save, belongs elsewhere now."""
        if known.pointers == pointers:
            return True
        moved = [number for number, (a, b) in enumerate(zip(known.pointers, pointers, strict=True)) if a != b]
        if self.optimizers:
            return not any(known.late[number] for number in moved)  # to copy at once is never wrong
        buffers = set(_pointers(_module_buffers(flat)))
        return all(
            known.late[number] == (pointers[number] not in buffers and not flat.tensors[number].is_inference())
            for number in moved
        )

    def _changed_by_optimizers_alone(self, flat: FlatState, pointers: Sequence[int]) -> list[bool]:
        """For every tensor: may its copy wait until the next optimizer step?

        With guarded optimizers: their parameters and their state. Without: everything but the buffers of modules in
        the state, and the version check catches what the caller changes too early.
        """
        owned = set(_pointers(_optimizer_tensors(self.optimizers)))
        buffers = set(_pointers(_module_buffers(flat)))
        late = []
        for tensor, pointer in zip(flat.tensors, pointers, strict=True):
            known = pointer in owned if self.optimizers else pointer not in buffers
            late.append(known and not tensor.is_inference())  # an inference tensor has no version
        return late


def _optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _module_buffers(flat: FlatState) -> Iterable[torch.Tensor]:
    for _, value in flat.stateful:
        if isinstance(value, torch.nn.Module):
            yield from value.buffers()


def _pointers(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    held = (local_parts(tensor, "a tensor of the optimizer") for tensor in tensors)
    return (local.data_ptr() for parts in held for local, _ in parts)
