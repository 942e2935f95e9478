"""Parameters that bitsandbytes has quantized: the packed weight, and the tensors that say how to read it.

The state of their module has each part under a name of its own, which other programs read: `weight`, `weight.absmax`,
`weight.quant_state.bitsandbytes__nf4` (4 bits), `weight`, `SCB` (8 bits). A 4-bit layer refuses these names when it
is given them, and an 8-bit layer does so once it has computed. So a load fills the parts in place, and gives the module
the weight alone. The names say which parameters these are; bitsandbytes itself is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from .shards import is_spread

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
            ValueError: what is stored is no description
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
        """Fill the number that is no tensor of its own in a state."""
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
