"""Dicts of other classes: how a checkpoint records the class, and what it can make again without a target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

_FACTORIES = {kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)}
_COUNTER, _DEFAULTDICT, _CLASS = "counter", "defaultdict", "class"


def class_kind(mapping: Mapping[Any, Any]) -> str:
    """How the class of a dict is recorded among the containers of a state: `counter`, `defaultdict int`, `class a.B`.

    A defaultdict whose factory is not a type of plain data is recorded as any other class.
    """
    if type(mapping) is Counter:
        return _COUNTER
    if type(mapping) is defaultdict:
        name = getattr(mapping.default_factory, "__name__", "")
        if name in _FACTORIES and _FACTORIES[name] is mapping.default_factory:
            return f"{_DEFAULTDICT} {name}"
    return f"{_CLASS} {type(mapping).__module__}.{type(mapping).__qualname__}"


def is_class_kind(kind: object) -> bool:
    """Whether a text is one of `class_kind`."""
    if not isinstance(kind, str):
        return False
    name, _, detail = kind.partition(" ")
    return kind == _COUNTER or (name == _DEFAULTDICT and detail in _FACTORIES) or (name == _CLASS and bool(detail))


def lost_class(kind: str) -> str | None:
    """The class that only a target has, and that `new_dict` does not make; None for any other kind."""
    name, _, detail = kind.partition(" ")
    return detail if name == _CLASS else None


def new_dict(kind: str | None) -> dict[Any, Any]:
    """An empty dict of the recorded class; a plain one for a class that it does not know."""
    name, _, detail = (kind or "").partition(" ")
    if name == _COUNTER:
        return Counter()
    return defaultdict(_FACTORIES[detail]) if name == _DEFAULTDICT else {}
