"""Try whether a module takes a state, on a copy of it that has the shapes of its tensors and none of their bytes.

Only code that is not torch's is tried: what torch's own modules give, they take. What torch shards is not tried, as its
hooks may call other ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .flatten import HOOKS, FlatState, is_torch_own, unflatten
from .paths import Path, key_of
from .shards import is_spread
from .wrapped_modules import without_parts

logger = logging.getLogger("ckpt_component.state")

#: How torch begins the errors of a module that refuses a state.
_REFUSAL = "Error(s) in loading state_dict for "


def modules_with_own_code(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost parts of a module whose state is not given and taken by torch's code alone.

    Returns:
        What the names of a part's values begin with, and the part.
    """
    if not is_torch_own(module, below=False) and not _is_distributed(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from modules_with_own_code(child, f"{prefix}{name}.")


def refusal_of(module: torch.nn.Module, state: Mapping[str, Any]) -> str | None:
    """What a module would say to a state that it does not take.

    Args:
        module: the module, which stays as it is
        state: the state, of which the shapes count

    Returns:
        The error's text in one line; None: it takes the state, or could not be copied, or its code needs the bytes.
    """
    tensors = [each for part in module.modules() for each in (*part._parameters.values(), *part._buffers.values())]
    memo: dict[int, Any] = {}
    try:
        given = {name: _on_meta(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        with _ShapesOnly(), torch.no_grad():
            memo.update((id(tensor), _on_meta(tensor)) for tensor in tensors if tensor is not None)
            for tensor in tensors:
                if tensor is not None:  # a class of parameters may have more in its attributes
                    vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
            trial = copy.deepcopy(module, memo)
        with torch.no_grad():
            trial.load_state_dict(given)
    except Exception as error:  # the code of a module may raise anything, above all on tensors without bytes
        if isinstance(error, RuntimeError) and str(error).startswith(_REFUSAL):
            return " ".join(str(error).removeprefix(_REFUSAL).split())
        logger.debug("whether %s takes its state could not be tried: %r", type(module).__name__, error)
    return None


def warn_of_refusals(flat: FlatState, known: set[str]) -> None:
    """Warn of the modules in a state that would not take what they have just given.

    Args:
        flat: the state
        known: keys of those that were warned of; gets the others
    """
    for path, module in flat.stateful:
        parts = [*modules_with_own_code(module)] if isinstance(module, torch.nn.Module) else []
        state = _state_at(flat, path) if parts else {}
        for prefix, part in parts:
            key = key_of((*path, *filter(None, [prefix.removesuffix(".")])))
            below = {name[len(prefix) :]: each for name, each in state.items() if str(name).startswith(prefix)}
            if key not in known and (refusal := refusal_of(part, below)) is not None:
                known.add(key)
                text = (
                    "no load can restore '%s' from what is saved: the module refuses the state that it has given (%s); "
                    "give it a _load_from_state_dict() that takes what its _save_to_state_dict() gives"
                )
                logger.warning(text, key, refusal)


def _state_at(flat: FlatState, path: Path) -> dict[Any, Any]:
    """The state of a module as a load gives it, under its own names."""
    depth = len(path)
    values = [*zip(flat.tensor_paths, flat.tensors, strict=True), *zip(flat.object_paths, flat.objects, strict=True)]
    below = {flat.own_path(place)[depth:]: value for place, value in values if place[:depth] == path}
    kinds = [(flat.own_path(place)[depth:], kind) for place, kind in flat.containers if place[:depth] == path]
    state = unflatten(below, kinds)
    return without_parts(state) if path in flat.quantized else state


def _is_distributed(module: torch.nn.Module) -> bool:
    """Whether a module, or one in it, has sharded parameters or hooks of `torch.distributed`."""
    hooks = (hook for part in module.modules() for name in HOOKS for hook in getattr(part, name).values())
    return any(map(is_spread, module.parameters())) or any(
        str(getattr(hook, "__module__", None)).startswith("torch.distributed.") for hook in hooks
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same class, shape and dtype that has no bytes."""
    meta = torch.empty_like(tensor.detach(), device="meta")
    if not isinstance(tensor, torch.nn.Parameter):
        return meta
    return torch.Tensor._make_subclass(type(tensor), meta, tensor.requires_grad)


class _ShapesOnly(TorchFunctionMode):
    """Copies of tensors have no bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = _on_meta(tensor)
            return memo[id(tensor)]
        if func in (torch.Tensor.clone, torch._C.TensorBase.clone):
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))
