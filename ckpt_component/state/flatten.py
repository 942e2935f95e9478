"""Flatten a nested state dict into lists of tensors and objects, and back.

The rules for which containers are flattened are those of `torch.distributed.checkpoint` since 2.4 (dicts always; a
list if it holds a tensor, a dict or such a list; a tuple never), because stock `dcp.load` looks for the resulting keys.
What stock DCP loses is recorded separately: int keys, empty dicts, `OrderedDict` and other classes of dicts.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any, Literal, Protocol

import torch

from ..errors import CheckpointStageError
from .held_tensors import GENERATOR_NAMES, GeneratorState, held_tensors, is_generator
from .objects import DEEPEST, is_config
from .paths import TAG, Path, PerRank, class_kind, key_of, new_dict, rank_name
from .shards import Shard, is_spread, mesh_of
from .tensors import ORDINARY
from .wrapped_modules import QUANTIZED_MARKS, WRAPPER_MARKS, CanonicalNames, add_parts_of_shards

StateDict = dict[str, Any]
#: The rank of `PerRank` values: one rank for all, or a function of path and value.
Owner = int | Callable[[Path, PerRank], int | None]

#: Hooks of modules and of optimizers around their states.
HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OPTIMIZER_HOOKS = tuple(f"_optimizer_{name[1:]}" for name in HOOKS)

_DICTS = (dict, OrderedDict)
#: Kinds of containers for which `unflatten` needs no class.
_KINDS = (None, "list", "odict", "empty")
#: Types of dict keys. Their subclasses, such as an enum's or numpy's, load as another type or not at all.
_PLAIN_KEYS = frozenset({str, int, float, bool, type(None)})
#: Dicts of at least this many values are first checked as a whole: 0.1 us per value instead of 0.3.
_WIDE = 16


class Stateful(Protocol):
    """An object with `state_dict()` and `load_state_dict()`, such as a module or an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""
        ...


def is_torch_own(stateful: Stateful, *, below: bool = True) -> bool:
    """Whether an object is an optimizer or a module whose state only torch's code takes and gives back.

    Args:
        stateful: the object
        below: of a module, with all modules in it; False: it alone
    """
    if isinstance(stateful, torch.optim.Optimizer):
        kind = type(stateful)
        methods = (kind.state_dict, kind.load_state_dict, kind.__setstate__)
        own = all(method.__module__.startswith("torch.optim.") for method in methods)
        return own and not any(getattr(stateful, name, None) for name in _OPTIMIZER_HOOKS)
    base = torch.nn.Module
    return isinstance(stateful, base) and all(
        not any(getattr(module, name) for name in HOOKS)
        and type(module).state_dict is base.state_dict
        and type(module).load_state_dict is base.load_state_dict
        and type(module).get_extra_state is base.get_extra_state
        and type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and type(module)._save_to_state_dict.__module__.startswith("torch.nn.modules.")
        for module in (stateful.modules() if below else [stateful])
    )


@dataclass
class FlatState:
    """A flattened state dict.

    Attributes:
        tensors: the tensors, in traversal order; not copied. Of a DTensor or ShardedTensor, the local parts of this
            rank, which all have the same path. Of a tensor made of tensors, these, below its path.
        tensor_paths: path of each tensor
        objects: everything else
        object_paths: path of each object
        containers: (path, kind) of containers that a plain dict would not restore: `list`, `odict`, `empty`, and the
            kinds of `dict_classes`, which come after those
        stateful: (path, object) of the values whose `state_dict()` was called
        shards: for every tensor, which part of a whole tensor it is; None: it is the whole
        placed: the DTensors, ShardedTensors and tensors made of tensors whose parts are in `tensors`, by number of the
            part
        elsewhere: those of which this rank holds no part, by path; they are not in `tensors`
        wrapped: names of the modules whose state has other names than its paths here, which are canonical; by path
        made: the tensors made of tensors, by path; of one within another, the outer one
        mappings: the dicts of other classes below the top, by path
        quantized: the modules whose state has parts of quantized parameters, by path
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    tensor_paths: list[Path] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    object_paths: list[Path] = field(default_factory=list)
    containers: list[tuple[Path, str]] = field(default_factory=list)
    stateful: list[tuple[Path, Stateful]] = field(default_factory=list)
    shards: list[Shard | None] = field(default_factory=list)
    placed: dict[int, torch.Tensor] = field(default_factory=dict)
    elsewhere: dict[Path, torch.Tensor] = field(default_factory=dict)
    wrapped: dict[Path, CanonicalNames] = field(default_factory=dict)
    made: dict[Path, torch.Tensor] = field(default_factory=dict)
    mappings: dict[Path, MutableMapping[Any, Any]] = field(default_factory=dict)
    quantized: dict[Path, torch.nn.Module] = field(default_factory=dict)

    @cached_property
    def pointers(self) -> array[int]:
        """The data pointer of each tensor.

        Raises:
            RuntimeError: a tensor has no data pointer, such as a sparse one
        """
        return array("Q", map(torch.Tensor.data_ptr, self.tensors))

    def counts_changes(self, number: int) -> bool:
        """Whether what changes a tensor raises its version counter.

        Changes of a DTensor, or of a tensor made of tensors, leave those of its parts alone.
        """
        whole = self.placed.get(number)
        return whole is None or (is_spread(whole) and mesh_of(whole) is None)

    def only(self, stays: Callable[[Path], bool]) -> FlatState:
        """This state without the values, and containers, whose paths do not stay."""
        tensors = [number for number, path in enumerate(self.tensor_paths) if stays(path)]
        objects = [number for number, path in enumerate(self.object_paths) if stays(path)]
        return replace(
            self,
            tensors=[self.tensors[number] for number in tensors],
            tensor_paths=[self.tensor_paths[number] for number in tensors],
            objects=[self.objects[number] for number in objects],
            object_paths=[self.object_paths[number] for number in objects],
            containers=[(path, kind) for path, kind in self.containers if stays(path)],
            shards=[self.shards[number] for number in tensors],
            placed={new: self.placed[old] for new, old in enumerate(tensors) if old in self.placed},
            elsewhere={path: tensor for path, tensor in self.elsewhere.items() if stays(path)},
            made={path: tensor for path, tensor in self.made.items() if stays(path)},
            mappings={path: mapping for path, mapping in self.mappings.items() if stays(path)},
        )

    def own_path(self, path: Path) -> Path:
        """A path with the names that the modules around it have themselves."""
        names = (self.wrapped.get(path[:depth]) for depth in range(len(path)))
        return tuple(part if name is None else name.own_name(part) for part, name in zip(path, names, strict=True))


def kind_of(value: Any) -> Literal["tensor", "dict", "list", "per_rank", "stateful", "generator", "object"]:
    """How `flatten` treats a value.

    Dicts are flattened, except that an encoded numpy value and an OmegaConf config (which would lose its
    interpolations) are objects. A list is flattened unless it holds objects only. A stateful value is replaced by its
    `state_dict()`, and a random generator by its state.
    """
    if type(value) in _DICTS or (isinstance(value, Mapping) and not is_config(value)):
        return "object" if TAG in value else "dict"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, PerRank):
        return "per_rank"
    if isinstance(value, list):
        for element in value:
            if kind_of(element) != "object":
                return "list"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return "stateful"
    if type(value).__name__ in GENERATOR_NAMES and is_generator(value):
        return "generator"
    return "object"


def flatten(state_dict: Mapping[Any, Any], rank: Owner = 0, world_size: int | None = None) -> FlatState:
    """Flatten a state dict; objects with `state_dict()` are replaced by their state at any depth.

    The state of a module has its canonical names (`state/wrapped_modules.py`).

    Args:
        state_dict: the state dict to save, or to load into
        rank: the rank whose name is the key of `PerRank` values; or a function that returns it for each of them, None
            to leave the value out
        world_size: how many ranks save together; None if this is not for a save

    Raises:
        CheckpointStageError: the state is not a dict, contains itself or is nested too deeply, a dict key is neither
            str, int, float, bool nor None, an object could not restore its state, or ranks that do not save hold parts
            of a tensor
    """
    if kind_of(state_dict) != "dict":
        raise not_a_state(state_dict)
    flat = FlatState()
    try:
        _walk((), state_dict, flat, rank)
    except RecursionError:
        raise _endless(state_dict) from None
    if ORDINARY.issuperset(map(type, flat.tensors)):
        flat.shards = [None] * len(flat.tensors)
    else:
        held = held_tensors(flat.tensor_paths, flat.tensors, world_size)
        flat.tensor_paths, flat.tensors, flat.shards = held.paths, held.tensors, held.shards
        flat.placed, flat.elsewhere, flat.made = held.placed, held.elsewhere, held.made
        flat.object_paths += held.contexts
        flat.objects += held.contexts.values()
    return flat


def not_a_state(value: object) -> CheckpointStageError:
    """The error for a value that was passed instead of a state dict."""
    named = "give it a name: {'model': ...}" if kind_of(value) == "stateful" else "give one such as {'model': model}"
    return CheckpointStageError(f"Expected a state dict, got a {type(value).__name__}; {named}.")


def _walk(path: Path, value: Any, flat: FlatState, owner: Owner, inside: bool = False) -> None:
    """Add a value and everything below it to `flat`. `inside`: it is part of an object's state, which that restores."""
    kind = kind_of(value)
    if len(path) > DEEPEST:
        raise RecursionError
    if kind == "object" or (kind == "generator" and inside):  # its object would get another value back
        flat.objects.append(value)
        flat.object_paths.append(path)
    elif kind == "tensor":
        flat.tensors.append(value)
        flat.tensor_paths.append(path)
    elif kind == "dict":
        if not value:
            flat.containers.append((path, "empty"))
        elif type(value) is OrderedDict:
            flat.containers.append((path, "odict"))
        if type(value) not in _DICTS and path and isinstance(value, MutableMapping):
            flat.containers.append((path, class_kind(value)))
            flat.mappings[path] = value
        tensors, paths = flat.tensors, flat.tensor_paths
        if (
            len(value) >= _WIDE
            and type(value) in _DICTS
            and ORDINARY.issuperset(map(type, value.values()))
            and set(map(type, value)) == {str}
        ):
            tensors += value.values()
            paths += zip(*map(repeat, path), value, strict=False)
            return
        for name, element in value.items():
            if type(name) not in _PLAIN_KEYS:
                raise CheckpointStageError(
                    f"A key of {key_of(path) or 'the state dict'} is the {type(name).__name__} {name!r}; "
                    "use str or int keys."
                )
            if type(element) in ORDINARY:  # a shortcut for the most frequent case
                tensors.append(element)
                paths.append((*path, name))
            else:
                _walk((*path, name), element, flat, owner, inside)
    elif kind == "list":
        flat.containers.append((path, "list"))
        for position, element in enumerate(value):
            _walk((*path, position), element, flat, owner, inside)
    elif kind == "per_rank":
        if inside:
            raise CheckpointStageError(
                f"'{key_of(path)}' is a PerRank in an object's state_dict(), and load_state_dict() would not get it "
                "back unchanged; wrap the object instead: PerRank(object)."
            )
        rank = owner if isinstance(owner, int) else owner(path, value)
        if rank is not None:
            _walk((*path, rank_name(rank)), value.value, flat, owner)
    elif kind == "generator":
        _walk(path, GeneratorState(value), flat, owner)
    else:
        state = value.state_dict()
        restorable = isinstance(state, Mapping) and callable(getattr(value, "load_state_dict", None))
        if not restorable and not inside:
            raise _not_restorable(path, value, state)
        flat.stateful.append((path, value))
        if isinstance(value, torch.nn.Module) and isinstance(state, Mapping):
            is_ordinary = "bitsandbytes" not in sys.modules or ORDINARY.issuperset(map(type, state.values()))
            if not is_ordinary and isinstance(state, dict):
                add_parts_of_shards(value, state)
            text = "\n".join(map(str, state))
            if any(map(text.__contains__, WRAPPER_MARKS)):  # seldom, and else nothing is renamed
                names = CanonicalNames(value, state)
                if names.differ:
                    state, flat.wrapped[path] = names.canonical_state(state), names
            if any(map(text.__contains__, QUANTIZED_MARKS)):
                flat.quantized[path] = value
        _walk(path, state, flat, owner, inside=True)


def _not_restorable(path: Path, value: Stateful, state: object) -> CheckpointStageError:
    """The error for an object that could not restore its state at a load."""
    if isinstance(state, Mapping):
        problem = (
            "which has state_dict() but no load_state_dict(), so no load could restore it; define load_state_dict(), "
            "or save what its state_dict() returns"
        )
    else:
        problem = f"whose state_dict() returned a {type(state).__name__}; a dict is expected"
    return CheckpointStageError(f"'{key_of(path)}' is a {type(value).__name__}, {problem}.")


def _endless(state_dict: Mapping[Any, Any]) -> CheckpointStageError:
    """The error for a state that is nested too deeply; names the value that contains itself, if there is one."""
    waiting: list[tuple[Path, Any, tuple[Any, ...]]] = [((), state_dict, ())]
    while waiting:
        path, value, around = waiting.pop()
        if any(value is container for container in around):
            return CheckpointStageError(f"'{key_of(path)}' contains itself, which cannot be checkpointed.")
        if len(path) > DEEPEST:
            break
        around = (*around, value)
        if isinstance(value, PerRank):
            waiting.append((path, value.value, around))
        elif isinstance(value, Mapping):
            waiting += [((*path, name), element, around) for name, element in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, position), element, around) for position, element in enumerate(value)]
        elif kind_of(value) == "stateful":
            waiting.append((path, value.state_dict(), around))
    return CheckpointStageError(f"The state dict is nested more than {DEEPEST} levels deep; flatten it.")


def unflatten(
    values: Mapping[Path, Any], containers: Iterable[tuple[Path, str]], *, classes: bool = False
) -> StateDict:
    """Build the nested state dict of flat values; the inverse of `flatten`.

    Args:
        values: the values by path
        containers: see `FlatState.containers`
        classes: make dicts of the recorded classes, as far as `new_dict` knows them; else they are plain
    """
    kinds = dict(containers)
    opened: dict[Path, Any] = {}

    def container(path: Path) -> Any:
        """The dict of the values below a path."""
        if path not in opened:
            kind = kinds.get(path)
            if classes and kind not in _KINDS:
                opened[path] = new_dict(kind)
            else:
                opened[path] = OrderedDict() if kind == "odict" else {}
            if path:
                container(path[:-1])[path[-1]] = opened[path]
        return opened[path]

    for path, value in values.items():
        container(path[:-1])[path[-1]] = value
    for path in kinds:
        container(path)
    # Lists were collected as dicts by position; convert them, innermost first.
    for path in sorted(kinds, key=len, reverse=True):
        if kinds[path] == "list":
            positions = opened[path]
            container(path[:-1])[path[-1]] = list(map(positions.get, sorted(positions)))
    root: StateDict = container(())
    return root
