"""How `zero_overhead` splits a state: copied at once, or copied in the background.

Tensors that forward may change (buffers such as BatchNorm's) are copied at once; those that only the optimizer changes
may wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch

from ..core.image.copy import CopyPlan
from ..state.flatten import FlatState
from ..state.shards import dense_parts
from .shared_memory import ArenaFill


class CopySplit:
    """How states of one structure are split for one arena.

    Args:
        fill: the arena, and a state
        optimizers: the guarded optimizers, which wait at the fence

    Attributes:
        now: the copies made at once
        later: the copies made in the background, until the fence
        watched: numbers of the tensors that must not change before the fence
    """

    def __init__(self, fill: ArenaFill, optimizers: Collection[torch.optim.Optimizer]) -> None:
        tensor_of = fill.slots.layout.tensor_of
        self._guarded = set(map(weakref.ref, optimizers))
        self._pointers = fill.flat.pointers
        self._proofs = fill.proofs
        #: For every tensor, whether its copy may wait.
        self._late = late = _changed_by_optimizers_alone(fill.flat, optimizers)
        numbers = fill.without_proofs(range(len(tensor_of)))
        # What forward and optimizers left alone since the last save is hashed in the background too.
        buffers = _pointers(_module_buffers(fill.flat)) if fill.proofs else set()
        at_once, waiting = dict[int, list[int]](), dict[int, list[int]]()
        watched = {number for number, waits in enumerate(late) if waits}
        for file, items in fill.proofs.items():
            tensors = {tensor_of[item] for item in items}
            counted = all(late[tensor] or fill.flat.counts_changes(tensor) for tensor in tensors)
            if counted and buffers.isdisjoint(map(fill.flat.pointers.__getitem__, tensors)):
                waiting[file] = items
                watched |= tensors
            else:
                at_once[file] = items
        self.now = CopyPlan(fill.slots, fill.sources, [item for item in numbers if not late[tensor_of[item]]], at_once)
        self.later = CopyPlan(fill.slots, fill.sources, [item for item in numbers if late[tensor_of[item]]], waiting)
        self.watched = sorted(watched)

    def fits(self, fill: ArenaFill, optimizers: Collection[torch.optim.Optimizer]) -> bool:
        """Whether the split still fits after tensors have moved, such as an RNG state created for every save."""
        flat = fill.flat
        if self._guarded != set(map(weakref.ref, optimizers)) or self._proofs != fill.proofs:
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
        return not any(flat.pointers[number] in buffers or not _has_counter(flat, number) for number in late)


def _changed_by_optimizers_alone(flat: FlatState, optimizers: Collection[torch.optim.Optimizer]) -> list[bool]:
    """For every tensor, whether its copy may wait until the next optimizer step.

    With guarded optimizers, their parameters and their state may wait. Without, all but DTensors and the buffers of
    modules in the state may, and version counters show most of what the caller changes too early.
    """
    owned = _pointers(_optimizer_tensors(optimizers))
    buffers = _pointers(_module_buffers(flat))
    if optimizers:
        return [
            pointer in owned and not tensor.is_inference()
            for tensor, pointer in zip(flat.tensors, flat.pointers, strict=True)
        ]
    return [pointer not in buffers and _has_counter(flat, number) for number, pointer in enumerate(flat.pointers)]


def _has_counter(flat: FlatState, number: int) -> bool:
    """Whether a version counter shows changes of a tensor; an inference tensor has none."""
    return flat.counts_changes(number) and not flat.tensors[number].is_inference()


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
    return {part.data_ptr() for tensor in tensors for part in dense_parts(tensor)}
