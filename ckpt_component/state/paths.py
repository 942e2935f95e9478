"""Paths of values in a nested state, and what marks a value or a dict: `PerRank`, classes of dicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import CheckpointConfigError

#: The path to a value: dict keys (str, int, float, bool or None) and list indexes.
Path = tuple[Any, ...]

#: The key that marks a dict as an encoded numpy value, which is one object. A user's dict with this key is refused.
TAG = "__ckpt_component_numpy__"
#: The key, beside the values of a module, of what stands for the frozen parameters that are left out.
FROZEN = "__ckpt_component_frozen__"
#: The key of what a tensor made of tensors is beside them; named after the method that takes it.
CONTEXT = "__tensor_unflatten__"


def key_of(path: Path) -> str:
    """The flat key of a path, as stock DCP names it: `model.layers.0.weight`."""
    return ".".join(map(str, path))


def keys_of(paths: Sequence[Path]) -> list[str]:
    """The flat keys of many paths."""
    try:
        return list(map(".".join, paths))
    except TypeError:  # not all parts are strings
        return list(map(key_of, paths))


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


WhenResized = Literal["keep", "first", "error"]


@dataclass
class PerRank:
    """A value of a state dict that differs from rank to rank. All other values must be equal on ranks with equal keys.

    Of those only one rank's value is saved; a save that finds a difference logs a warning with the key.

    Args:
        value: a plain value, a tensor, nested containers, or an object with `state_dict()` and `load_state_dict()`. A
            load updates it in place, or replaces it if it is a plain value.
        when_resized: what a load does if the checkpoint was saved with another number of ranks: `keep` keeps the
            current value, `first` loads that of rank 0, `error` raises

    Raises:
        CheckpointConfigError: `when_resized` is not one of these three
    """

    value: Any
    when_resized: WhenResized = "error"

    def __post_init__(self) -> None:
        if self.when_resized not in get_args(WhenResized):
            raise CheckpointConfigError(
                f"PerRank(when_resized={self.when_resized!r}) is unknown; use 'keep', 'first' or 'error'."
            )


def rank_name(rank: int) -> str:
    """The key of a rank's own value: `rank_00003`."""
    return f"rank_{rank:05d}"


def rank_of(name: object) -> int | None:
    """The inverse of `rank_name`; None for any other name."""
    if isinstance(name, str) and name.startswith("rank_") and name[5:].isdigit():
        return int(name[5:])
    return None
