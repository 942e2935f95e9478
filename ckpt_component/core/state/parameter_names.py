"""Name the parameters of optimizers, whose state dicts know them by number alone.

A parameter's name is its key in the state: that of the module that has it, or of a tensor with the same memory. Else it
is the one that the optimizer was given with it (`param_names`, torch 2.6). A checkpoint stores the names beside the
optimizer's state, at `param_names`: a list for each group, in the order of the numbers. So what reads an optimizer's
state dict finds it as torch made it, and a load can give each state to the parameter of its name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

from .flatten import FlatState
from .paths import Path, key_of
from .wrapped_modules import WRAPPER_MARKS, CanonicalNames

#: Where an optimizer's state has the names: the last part of the path.
NAMES = "param_names"
#: The names of an optimizer's parameters, by group; None: a parameter has none.
Names = list[list[str | None]]


class NamedOptimizer(NamedTuple):
    """An optimizer in a state, that restores itself.

    Attributes:
        path: its path
        optimizer: the optimizer
        names: names of its parameters in the state, by group
        own: the names that it was given with its parameters, by group
    """

    path: Path
    optimizer: torch.optim.Optimizer
    names: Names
    own: Names

    @property
    def has_names(self) -> bool:
        """Whether a parameter has a name."""
        return any(name is not None for name in chain(*self.names, *self.own))


def optimizers_of(flat: FlatState) -> list[tuple[Path, torch.optim.Optimizer]]:
    """The optimizers in a state whose `state_dict()` has the form that torch gives it, with their paths.

    An optimizer inside another object's state is that object's.
    """
    paths = {path for path, _ in flat.stateful}
    lists = {path for path, kind in flat.containers if kind == "list"}
    return [
        (path, value)
        for path, value in flat.stateful
        if isinstance(value, torch.optim.Optimizer)
        and (*path, "param_groups") in lists
        and paths.isdisjoint(path[:depth] for depth in range(len(path)))
    ]


def named_optimizers(flat: FlatState) -> list[NamedOptimizer]:
    """The optimizers in a state, with the names of their parameters."""
    optimizers = optimizers_of(flat)
    if not optimizers:
        return []
    keys = dict(_parameters_of_modules(flat))
    wanted = [id(each) for _, optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    by_memory = {} if keys.keys() >= {*wanted} else _tensors_by_memory(flat, {path for path, _ in optimizers})

    def name_of(parameter: torch.Tensor) -> str | None:
        return keys.get(id(parameter)) or (by_memory.get(_memory_of(parameter)) if by_memory else None)

    return [
        NamedOptimizer(
            path,
            optimizer,
            [[name_of(each) for each in group["params"]] for group in optimizer.param_groups],
            [[*group.get("param_names", [None] * len(group["params"]))] for group in optimizer.param_groups],
        )
        for path, optimizer in optimizers
    ]


class ParameterNames:
    """Adds the names of parameters to states that are saved, one after the other.

    Names are looked up again only for an optimizer with other parameters than last time: it takes a millisecond for two
    thousand parameters.
    """

    def __init__(self) -> None:
        #: By path of the optimizer: its parameters, and their names.
        self._known: dict[Path, tuple[list[weakref.ref[torch.Tensor]], Names]] = {}

    def add_to(self, flat: FlatState) -> None:
        """Add them to the objects of a state."""
        optimizers = optimizers_of(flat)
        if not all(self._knows(path, optimizer) for path, optimizer in optimizers):
            self._look_up(flat)
        taken = {path for path in flat.object_paths if path[-1] == NAMES}
        for path, _ in optimizers:
            names, place = self._known[path][1], (*path, NAMES)
            if place not in taken and any(map(any, names)):
                flat.objects.append(names)
                flat.object_paths.append(place)

    def renew(self, flat: FlatState) -> None:
        """Look the names up again, in a state that they were added to: its structure is another one than last time."""
        old = {id(names): path for path, (_, names) in self._known.items()}
        added = [(number, old[id(value)]) for number, value in enumerate(flat.objects) if id(value) in old]
        self._look_up(flat)
        for number, path in added:
            flat.objects[number] = self._known[path][1]

    def _look_up(self, flat: FlatState) -> None:
        self._known = {
            each.path: (
                [weakref.ref(parameter) for group in each.optimizer.param_groups for parameter in group["params"]],
                [
                    [name or own for name, own in zip(*pair, strict=True)]
                    for pair in zip(each.names, each.own, strict=True)
                ],
            )
            for each in named_optimizers(flat)
        }

    def _knows(self, path: Path, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has the parameters that it had, in the same groups."""
        if path not in self._known:
            return False
        known, names = self._known[path]
        groups = optimizer.param_groups
        if list(map(len, names)) != [len(group["params"]) for group in groups]:
            return False
        parameters = chain.from_iterable(group["params"] for group in groups)
        return all(one() is other for one, other in zip(known, parameters, strict=True))


def _parameters_of_modules(flat: FlatState) -> Iterator[tuple[int, str]]:
    """The identity and the canonical name of each parameter of the modules in a state; of several names, the first."""
    found: set[int] = set()
    for path, value in flat.stateful:
        if isinstance(value, torch.nn.Module):
            parameters = dict(value.named_parameters())
            text = "\n".join(parameters)
            names = CanonicalNames(value, parameters).of if any(map(text.__contains__, WRAPPER_MARKS)) else {}
            for own, parameter in parameters.items():
                if id(parameter) not in found:
                    found.add(id(parameter))
                    yield id(parameter), key_of((*path, names.get(own, own)))


def _tensors_by_memory(flat: FlatState, optimizers: set[Path]) -> Mapping[Any, str]:
    """The keys of the tensors that are not an optimizer's, by memory; of several with the same memory, the first."""
    keys: dict[Any, str] = {}
    for path, tensor in zip(flat.tensor_paths, flat.tensors, strict=True):
        if optimizers.isdisjoint(path[:depth] for depth in range(len(path))):
            keys.setdefault(_memory_of(tensor), key_of(path))
    keys.pop(None, None)
    return keys


def _memory_of(tensor: torch.Tensor) -> Any:
    """What identifies a tensor of a state and a parameter with the same memory; None: it has no memory of its own."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    try:
        return (local.data_ptr(), local.dtype, local.shape) if local.numel() and local.data_ptr() else None
    except RuntimeError:  # such as a sparse one, or one that is not initialized yet
        return None
