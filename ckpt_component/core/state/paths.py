"""Paths of values in a nested state, and the flat keys that stand for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: The path to a value: dict keys (str, int, float, bool or None) and list indexes.
Path = tuple[Any, ...]

#: The key that marks a dict as an encoded numpy value, which is one object. A user's dict with this key is refused.
TAG = "__ckpt_component_numpy__"
#: The key, beside the values of a module, of what stands for the frozen parameters that are left out.
FROZEN = "__ckpt_component_frozen__"


def key_of(path: Path) -> str:
    """The flat key of a path, as stock DCP names it: `model.layers.0.weight`."""
    return ".".join(map(str, path))


def keys_of(paths: Sequence[Path]) -> list[str]:
    """The flat keys of many paths."""
    try:
        return list(map(".".join, paths))
    except TypeError:  # not all parts are strings
        return list(map(key_of, paths))
