"""Name the parameters of optimizers, whose state dicts know them by number alone.

A parameter's name is its key in the state: that of the module that has it, or of a tensor with the same memory. Else it
is the one that the optimizer was given with it (`param_names`, torch 2.6). A checkpoint stores the names beside the
optimizer's state, at `param_names`: a list for each group, in the order of the numbers. So what reads an optimizer's
state dict finds it as torch made it, and a load can give each state to the parameter of its name.
"""

from __future__ import annotations

import operator
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
    wanted = [each for _, optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if not keys.keys() >= {*map(id, wanted)}:
        by_memory = _tensors_by_memory(flat, {path for path, _ in optimizers})
        known = ((id(each), by_memory.get(_memory_of(each))) for each in wanted if id(each) not in keys)
        keys.update((number, name) for number, name in known if name is not None)
    return [
        NamedOptimizer(
            path,
            optimizer,
            [[keys.get(id(each)) for each in group["params"]] for group in optimizer.param_groups],
            [[*group.get("param_names", [None] * len(group["params"]))] for group in optimizer.param_groups],
        )
        for path, optimizer in optimizers
    ]


class ParameterNames:
    """Adds the names of parameters to states that are saved, one after the other.

    Names are looked up again only for optimizers with other parameters than last time: it takes a millisecond for two
    thousand parameters.
    """

    def __init__(self) -> None:
        #: The groups of all optimizers: path of the optimizer, and number of parameters.
        self._sizes: list[tuple[Path, int]] = []
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        #: What is added: the places, and the names of an optimizer's parameters.
        self._added: list[tuple[Path, Names]] = []

    def add_to(self, flat: FlatState, *, again: bool = False) -> None:
        """Add them to the objects of a state.

        Args:
            flat: the state
            again: look the names up again, and add them in place of those that were added: the state has another
                structure than last time
        """
        optimizers = [(path, value) for path, value in flat.stateful if isinstance(value, torch.optim.Optimizer)]
        groups = [(path, group["params"]) for path, optimizer in optimizers for group in optimizer.param_groups]
        sizes, parameters = [(path, len(group)) for path, group in groups], chain.from_iterable(g for _, g in groups)
        known = (reference() for reference in self._parameters)
        if again or sizes != self._sizes or not all(map(operator.is_, known, parameters)):
            self._look_up(flat)
            self._sizes, self._parameters = sizes, [weakref.ref(each) for _, group in groups for each in group]
        flat.object_paths += [path for path, _ in self._added]
        flat.objects += [names for _, names in self._added]

    def _look_up(self, flat: FlatState) -> None:
        """Note what is to be added to a state, from which what was added is taken out."""
        known = {id(names) for _, names in self._added}
        while flat.objects and id(flat.objects[-1]) in known:
            flat.objects.pop()
            flat.object_paths.pop()
        taken = {path for path in flat.object_paths if path[-1] == NAMES}
        self._added = []
        for optimizer in named_optimizers(flat):
            place = (*optimizer.path, NAMES)
            names = [
                [name or own for name, own in zip(*pair, strict=True)]
                for pair in zip(optimizer.names, optimizer.own, strict=True)
            ]
            if place not in taken and any(map(any, names)):
                self._added.append((place, names))


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
