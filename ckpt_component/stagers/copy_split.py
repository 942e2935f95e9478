"""How `zero_overhead` splits a state: copied at once, copied in the background, or copied to the device buffer.

Tensors that forward may change (buffers such as BatchNorm's) are copied at once; those that only the optimizer changes
may wait. The device buffer takes tensors of its device, first those that training would have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..core.image.copy import CopyPlan
from ..core.state.flatten import FlatState
from ..core.state.shards import local_parts
from .device_buffer import DeviceBuffer
from .shared_memory import ArenaFill

#: With a device buffer, up to this much of host memory is copied at once: step counts of PyTorch's optimizers are
#: there, and need no fence then.
_AT_ONCE_BYTES = 16 << 20


class CopySplit:
    """How states of one structure are split for one arena.

    Args:
        fill: the arena, and a state.
        optimizers: the guarded optimizers, which wait at the fence.
        buffer: the device buffer; None: not used by this snapshot.

    Attributes:
        now: the copies made at once.
        later: the copies made in the background, until the fence.
        buffered: numbers of the items in the device buffer.
        watched: numbers of the tensors that must not change before the fence.
    """

    def __init__(
        self, fill: ArenaFill, optimizers: Sequence[torch.optim.Optimizer], buffer: DeviceBuffer | None
    ) -> None:
        layout, sources = fill.slots.layout, fill.sources
        self._guarded = len(optimizers)
        self._pointers = fill.flat.pointers
        #: For every tensor, whether its copy may wait.
        self._late = late = _changed_by_optimizers_alone(fill.flat, optimizers)
        self.buffered = frozenset[int]()
        if buffer is not None:
            # Joined tensors are one item, for which it is hard to tell whether each tensor may be changed.
            alone = (number for number in range(len(sources)) if number not in layout.windows)
            order = sorted(alone, key=lambda number: late[layout.tensor_of[number]])
            self.buffered = buffer.place(sources, order)
        at_once = _few_on_host(fill, late, buffer) if buffer is not None and self.buffered else set[int]()
        now: list[int] = []
        later: list[int] = []
        for number, tensor in enumerate(layout.tensor_of):
            if number not in self.buffered:
                (later if late[tensor] and number not in at_once else now).append(number)
        self.now = CopyPlan(fill.slots, sources, now)
        self.later = CopyPlan(fill.slots, sources, later)
        structure = layout.structure
        free = {layout.tensor_of[number] for number in (*self.buffered, *at_once)}
        stored = (structure.stored[number].tensor for number in structure.stored_of)
        self.watched = [number for number, tensor in enumerate(stored) if late[number] and tensor not in free]

    def fits(self, flat: FlatState, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the split still fits after tensors have moved, such as an RNG state created for every save."""
        if self._guarded != len(optimizers):
            return False
        before, self._pointers = self._pointers, flat.pointers
        if before == flat.pointers:
            return True
        late = [
            number
            for number, (waits, old, new) in enumerate(zip(self._late, before, flat.pointers, strict=True))
            if waits and old != new  # anything may be copied at once
        ]
        if optimizers:
            return not late
        buffers = _pointers(_module_buffers(flat)) if late else set()
        return not any(flat.pointers[number] in buffers or flat.tensors[number].is_inference() for number in late)


def _few_on_host(fill: ArenaFill, late: Sequence[bool], buffer: DeviceBuffer) -> set[int]:
    """The items in host memory that could wait, if they are so few that copying them at once is faster."""
    layout, sources = fill.slots.layout, fill.sources
    on_host = {
        number
        for number, tensor in enumerate(layout.tensor_of)
        if late[tensor] and number not in layout.windows and buffer.device_of(sources[number]) is None
    }
    few = sum(sources[number].nbytes for number in on_host) <= _AT_ONCE_BYTES
    return on_host if few else set()


def _changed_by_optimizers_alone(flat: FlatState, optimizers: Sequence[torch.optim.Optimizer]) -> list[bool]:
    """For every tensor, whether its copy may wait until the next optimizer step.

    With guarded optimizers, their parameters and their state may wait. Without, all but the buffers of modules in the
    state may, and the version check detects what the caller changes too early.
    """
    owned = _pointers(_optimizer_tensors(optimizers))
    buffers = _pointers(_module_buffers(flat))
    late = []
    for tensor, pointer in zip(flat.tensors, flat.pointers, strict=True):
        may_wait = pointer in owned if optimizers else pointer not in buffers
        late.append(may_wait and not tensor.is_inference())  # an inference tensor has no version
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


def _pointers(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {local.data_ptr() for tensor in tensors for local, _ in local_parts(tensor, "a tensor of the optimizer")}
