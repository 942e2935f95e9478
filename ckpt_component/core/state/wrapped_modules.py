"""The canonical names of a module's state: those that it has without the modules that wrap it or parts of it.

`torch.compile`, data parallelism, activation checkpointing and FSDP1 put a module around another one, and a part into
its names: `_orig_mod.weight`. Canonical names are those of torch's `get_model_state_dict`. The modules decide which
parts go, so that a child that its author called `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .dense_tensors import ORDINARY
from .quantized_parameters import QUANTIZED_MARKS, add_parts_of_shards, parts_to_fill

#: What wrappers call the module inside. Others may have a child called `module`.
WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Texts of which one is in each name with a wrapper's part. If none is, as in most states, no module is asked.
WRAPPER_MARKS = ("_orig_mod.", "module.")


class CanonicalNames:
    """The names of a module's values: its own and the canonical ones.

    If two values would get the same name, all keep their own.

    Args:
        module: the module, which may be wrapped, or have wrapped ones inside
        keys: its own names: keys of its `state_dict()`, or names of parameters. Some wrappers take their part out of
            them by themselves.

    Attributes:
        of: the canonical names, by own name
        differ: whether one differs
    """

    def __init__(self, module: torch.nn.Module, keys: Iterable[Any]) -> None:
        #: The module that has an own prefix, and its canonical prefix; wrappers before the modules that they wrap.
        self._places: dict[str, tuple[torch.nn.Module | None, str]] = {"": (module, "")}
        self.of = {key: self._canonical(key) for key in keys}
        if len({*self.of.values()}) < len(self.of):
            self.of = {key: key for key in self.of}
        self.differ = [*self.of] != [*self.of.values()]
        #: The own prefixes by canonical prefix; of a wrapper and what it wraps, that of the latter.
        self._prefixes = {canonical: f"{own}." if own else "" for own, (_, canonical) in self._places.items()}

    def canonical_state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The module's state under canonical names."""
        return _renamed(state, self.of.__getitem__)

    def own_state(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """A state under canonical names as the module takes it."""
        return _renamed(state, self.own_name)

    def own_name(self, key: Any) -> Any:
        """The own name for a canonical one. Of a value that the module does not have: that below the same modules."""
        if key in self._own or not self.differ or not isinstance(key, str) or self._canonical(key) != key:
            return self._own.get(key, key)
        above = key
        while above not in self._prefixes:
            above = above[: above.removesuffix(".").rfind(".") + 1]
        return self._prefixes[above] + key[len(above) :]

    @cached_property
    def _own(self) -> dict[Any, Any]:
        """The own names by canonical name."""
        return {canonical: own for own, canonical in self.of.items()}

    def _canonical(self, key: Any) -> Any:
        if not isinstance(key, str):
            return key
        before, _, name = key.rpartition(".")
        return (self._places.get(before) or self._place(before))[1] + name

    def _place(self, prefix: str) -> tuple[torch.nn.Module | None, str]:
        """The module with an own prefix, if it is that of one, and the canonical prefix."""
        if prefix not in self._places:
            before, _, name = prefix.rpartition(".")
            module, canonical = self._place(before)
            part = _part_inside(module)
            while module is not None and part is not None and name not in module._modules:  # a hook took the part away
                module = module._modules[part]
                part = _part_inside(module)
            inside = module._modules[name] if module is not None and name in module._modules else None
            self._places[prefix] = inside, canonical if part == name else f"{canonical}{name}."
        return self._places[prefix]


def canonical_state_of(module: torch.nn.Module) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """The state of a module to fill, under canonical names, and what gives such a state its own names again."""
    state = module.state_dict()
    if "bitsandbytes" in sys.modules and not ORDINARY.issuperset(map(type, state.values())):
        add_parts_of_shards(module, state)
    if any(map("\n".join(map(str, state)).__contains__, QUANTIZED_MARKS)):
        state.update(parts_to_fill(module, state))
    names = CanonicalNames(module, state)
    return names.canonical_state(state), names.own_state


def without_wrappers(key: str) -> str:
    """A key without all parts that wrappers use, where no module says which of them are a wrapper's."""
    return ".".join(part for part in key.split(".") if part not in WRAPPER_PARTS)


def names_in_other_wrapping(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Names with those of `others` that differ in parts of wrappers alone, if there is one of either.

    Args:
        names: without those that are in `others`
        others: without those that are in `names`
    """
    here, there = _by_plain_name(names), _by_plain_name(others)
    alone = (plain for plain in here.keys() & there.keys() if len(here[plain]) == len(there[plain]) == 1)
    return {here[plain].pop(): there[plain].pop() for plain in alone}


def _by_plain_name(names: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        found[without_wrappers(name)].add(name)
    return found


def _part_inside(module: torch.nn.Module | None) -> str | None:
    """What a wrapper calls the module inside; None: the module is no wrapper."""
    parts = WRAPPER_PARTS.intersection(() if module is None else module._modules.keys())
    if "module" in parts and not isinstance(module, (DistributedDataParallel, DataParallel)):
        parts -= {"module"}
    return min(parts, default=None)


def _renamed(state: Mapping[Any, Any], name_of: Callable[[Any], Any]) -> dict[Any, Any]:
    """A state under other names."""
    names = zip(map(name_of, state), state.values(), strict=True)
    if not isinstance(state, OrderedDict):
        return dict(names)
    renamed = OrderedDict(names)
    vars(renamed).update(vars(state))  # torch attaches the versions of modules
    return renamed
