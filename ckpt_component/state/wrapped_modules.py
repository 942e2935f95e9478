"""The canonical names of a module's state: those that it has without the modules that wrap it or parts of it.

`torch.compile`, data parallelism, activation checkpointing and FSDP1 put a module around another one, and a part into
its names: `_orig_mod.weight`. Canonical names are those of torch's `get_model_state_dict`. The modules decide which
parts go, so that a child that its author called `module` keeps its name.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .shards import is_spread
from .tensors import ORDINARY

#: Texts of which one is in the state of each module with such parameters. If none is, no module is asked.
QUANTIZED_MARKS = (".quant_state.bitsandbytes__", "SCB")

#: Of the parts of a 4-bit weight, where its quantization state has them.
_PARTS = {
    "absmax": ("absmax",),
    "quant_map": ("code",),
    "nested_absmax": ("state2", "absmax"),
    "nested_quant_map": ("state2", "code"),
}
_STATE = QUANTIZED_MARKS[0]
#: A number in the description that differs from base to base, and is a tensor in the layer.
_OFFSET = "nested_offset"


class QuantDescription(torch.Tensor):
    """The numbers and names of a quantization state, as JSON in a tensor of bytes, whose length they change.

    Attributes:
        quant_state: what it describes, a `QuantState` of bitsandbytes
    """

    quant_state: Any

    @classmethod
    def of(cls, encoded: torch.Tensor, quant_state: Any) -> QuantDescription:
        """The description of a state, given its bytes."""
        with torch.inference_mode(False):
            description: QuantDescription = torch.Tensor._make_subclass(cls, encoded.detach())
        description.quant_state = quant_state
        return description

    def difference(self, stored: torch.Tensor) -> str | None:
        """How another description differs, with both values; None: at most in the number that `accept` fills.

        Raises:
            ValueError: what is stored is not a description
        """
        own, theirs = _decoded(self), _decoded(stored)
        for values in (own, theirs):
            if _OFFSET in values:
                values[_OFFSET] = "a number"
        for name in {**own, **theirs}:
            one, other = own.get(name), theirs.get(name)
            if one != other:
                return f"has {name} {one!r:.100} in the target and {other!r:.100} in the checkpoint"
        return None

    def accept(self, stored: torch.Tensor) -> None:
        """Fill the number that is not a tensor of its own in a state."""
        offset = self.quant_state.offset
        if offset is not None:
            with torch.no_grad():
                offset.fill_(_decoded(stored)[_OFFSET])


def parts_of_parameters(names: Iterable[Any]) -> dict[str, list[str]]:
    """The names of the parts beside each quantized parameter in the state of a module, by the parameter's name."""
    known, parts = dict.fromkeys(names), dict[str, list[str]]()
    for name in known:
        if not isinstance(name, str):
            continue
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            parts[weight] = [*(each for part in _PARTS if (each := f"{weight}.{part}") in known), name]
        elif name.rpartition(".")[2] == "SCB" and (weight := f"{name[:-3]}weight") in known:
            parts[weight] = [each for each in (name, f"{name[:-3]}weight_format") if each in known]
    return parts


def add_parts_of_shards(module: torch.nn.Module, state: dict[Any, Any]) -> None:
    """Add the parts of 4-bit weights that are sharded, which their layers do not find in a DTensor.

    Args:
        module: the module
        state: from its `state_dict()`
    """
    for name, layer in module.named_modules():
        weight, place = layer._parameters.get("weight"), ".".join(filter(None, [name, "weight"]))
        quant_state = vars(layer).get("quant_state")
        if weight is not None and quant_state is not None and is_spread(weight) and place in state:
            parts = {f"{place}.{part}": each for part, each in quant_state.as_dict(packed=True).items()}
            state.update({part: each.detach() for part, each in parts.items() if part not in state})


def parts_to_fill(module: torch.nn.Module, state: Mapping[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts that a load fills, where the state has copies of them.

    Args:
        module: the module
        state: from its `state_dict()`, by its own names

    Returns:
        The tensors of the layers by name, and a `QuantDescription` for each 4-bit weight.
    """
    filled: dict[str, torch.Tensor] = {}
    for weight, parts in parts_of_parameters(state).items():
        for name in parts:
            if _STATE in name:
                parameter = module.get_parameter(weight)
                layer = module.get_submodule(weight.rpartition(".")[0]) if is_spread(parameter) else parameter
                quant_state = vars(layer)["quant_state"]
                filled[name] = QuantDescription.of(state[name], quant_state)
                for part, attributes in _PARTS.items():
                    if f"{weight}.{part}" in parts:
                        live = quant_state
                        for attribute in attributes:
                            live = getattr(live, attribute)
                        filled[f"{weight}.{part}"] = live
    return filled


def without_parts(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state that a load has filled, as the module takes it: without the parts beside the weights."""
    for parts in parts_of_parameters(state).values():
        for name in parts:
            if not name.endswith("weight_format"):  # which an 8-bit layer checks, and takes out itself
                del state[name]
    return state


def quantized_name(key: str, keys: Container[str]) -> str | None:
    """The key that says that a weight is quantized, among the keys of a state; None: none does."""
    likely = [f"{key}{_STATE}{kind}" for kind in ("nf4", "fp4")]
    if key.rpartition(".")[2] == "weight":
        likely.append(f"{key[:-6]}SCB")
    return next((name for name in likely if name in keys), None)


def _decoded(description: torch.Tensor) -> dict[str, Any]:
    """What a description says.

    Raises:
        ValueError: it is none
    """
    found = json.loads(bytes(description.detach().as_subclass(torch.Tensor).cpu().tolist()))
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.60} describes no quantization")
    return found


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
    """What a wrapper calls the module inside; None: the module is not a wrapper."""
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
