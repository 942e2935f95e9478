"""What an optimizer makes of the values that it is given: torch casts its state, and replaces the script's options."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from ..state.compare import same_value
from ..state.tensors import ORDINARY

#: Options that a scheduler changes at each step, where its own start value (`initial_lr`) is the checkpoint's.
_SCHEDULED, _CYCLED = frozenset({"lr"}), frozenset({"betas", "momentum"})


def put_back(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Put values that torch has cast back as they were loaded.

    `Optimizer.load_state_dict` casts floating-point state to the parameter's dtype, so that float32 moments of a
    bfloat16 parameter lose half of their bits; and of a text it makes the text of a generator.

    Args:
        optimizer: it has taken the state
        state: the `state` of the state dict that it took
    """
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    waiting: list[tuple[Any, Any]] = [
        (optimizer.state.get(parameters[number]), loaded)
        for number, loaded in state.items()
        if type(number) is int and number < len(parameters)
    ]
    while waiting:
        taken, loaded = waiting.pop()
        if not isinstance(taken, dict) or not isinstance(loaded, Mapping):
            continue
        for name, value in loaded.items():
            now = taken.get(name)
            if isinstance(value, Mapping) and isinstance(now, dict):
                waiting.append((now, value))
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                # A tensor made of tensors may be made anew with the same dtype.
                is_cast = now.dtype != value.dtype or (type(value) not in ORDINARY and not same_value(now, value))
                if is_cast and now.shape == value.shape:
                    taken[name] = value.to(now.device)
            elif name in taken and type(now) is type(value) and not same_value(now, value):
                taken[name] = value


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, such as `lr`, as values of this moment."""
    return [
        {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def replaced_options(key: str, optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> str | None:
    """What a load has replaced of the options that the script built an optimizer with, to log; None: nothing.

    Args:
        key: the optimizer's key
        optimizer: it has taken its state
        before: its options before that, from `options_of`
    """
    replaced: dict[str, dict[str, None]] = {}
    for old, new in zip(before, optimizer.param_groups, strict=False):
        moving = frozenset[str]()
        if "initial_lr" in old and same_value(old["initial_lr"], new.get("initial_lr")):
            moving = _SCHEDULED | _CYCLED if "base_momentum" in old else _SCHEDULED
        for name in old.keys() - moving:
            if name in new and not same_value(old[name], new[name]):
                text = f"{_text(old[name])} by {_text(new[name])}"
                replaced.setdefault(name, {})[text] = None
    if not replaced:
        return None
    changes = ", ".join(f"{name} {' and '.join(texts)}" for name, texts in sorted(replaced.items()))
    names = [f"{key}.param_groups.*.{name}" for name in sorted(replaced)]
    return f"'{key}': the checkpoint replaces {changes}; to keep the script's values, load with ignore={names}"


def _text(value: Any) -> str:
    return f"{value.item()!r}" if isinstance(value, torch.Tensor) and value.numel() == 1 else f"{value!r:.60}"
