"""The schemas as Hydra composes with them.

Hydra checks types while it composes, and would refuse `8MB` for a number of bytes; and it shows and completes an
enum as `OnError.raise`, which nobody can type. So composed configs have texts there; `resolve_config` gives them
the types of the schema itself.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any, cast, get_args, get_type_hints

from ..spelling import closest
from .errors import HydraConfigError
from .quantities import quantity


class _Derived(type):
    """The type of the classes that `composable` makes; `schema` is what they are made from."""

    schema: type


class _FromSchema(metaclass=_Derived):
    """Their base."""


def composable(schema: type) -> type:
    """The dataclass for the config store that belongs to a schema, a dataclass too.

    A process that unpickles a config, such as a launcher's worker, makes the class anew from the schema.
    """
    made = vars(schema).get("composable")
    if made is None:
        hints = get_type_hints(schema)
        items = [_loosened(item, hints[item.name]) for item in fields(schema)]
        made = make_dataclass(schema.__name__, items, bases=(_FromSchema,))
        made.__module__, made.__qualname__ = schema.__module__, f"{schema.__qualname__}.composable"
        made.schema = schema  # type: ignore[attr-defined]
        type.__setattr__(schema, "composable", made)
    return made


def _reduced(made: _Derived) -> tuple[Any, ...]:
    return composable, (made.schema,)


copyreg.pickle(_Derived, _reduced)


def as_numbers(schema: type, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values with numbers for what was written with a unit.

    Args:
        schema: whose keys they are.
        values: plain; inner nodes included.
        name: in front of a key, for errors.

    Raises:
        CheckpointConfigError: a text that is no such quantity, or none of an enum's words.
    """
    hints, known = get_type_hints(schema), {item.name: item for item in fields(schema)}
    result = dict(values)
    for key, value in values.items():
        full = f"{name}.{key}" if name else key
        if key not in known:
            continue
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            result[key] = as_numbers(hints[key], value, full)
        elif known[key].metadata.get("unit") and isinstance(value, str) and value != "???":
            result[key] = quantity(value, known[key].metadata["unit"], full)
        elif _is_enum(hints[key]) and value != "???":
            refuse_other_words(full, value, list(hints[key].__members__))
    return result


def refuse_other_words(full_key: str, value: Any, words: list[str]) -> None:
    """Refuse a value that is none of the words; an enum's member is one."""
    if isinstance(value, Enum) or value in words:
        return
    near = closest(str(value), words)
    hint = f" Did you mean {full_key}={near}?" if near else ""
    if str(value) == "False" and "off" in words:
        hint = " YAML reads off as false; quote it: 'off'."
    text = "null" if value is None else value
    raise HydraConfigError(f"{full_key} must be {', '.join(words[:-1])} or {words[-1]}, got {text}.{hint}")


def _loosened(item: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    default, factory, kind = item.default, item.default_factory, hint
    if is_dataclass(hint):
        kind = factory = cast(Any, composable(cast(type, hint)))
    elif _is_enum(hint):
        kind, default = str, default.name
    elif item.metadata.get("unit"):
        kind = int | float | str | None if type(None) in get_args(hint) else int | float | str
    if factory is not MISSING:
        return item.name, kind, field(default_factory=factory)
    return item.name, kind, field(default=default)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)
