"""Schemas in the form in which Hydra composes them.

Hydra checks types while composing: it would refuse `8MB` for a number of bytes, and it shows and completes an enum as
`OnError.raise`, which cannot be typed. So composed configs have words there, of which Hydra checks nothing (1.4 takes
no member of an enum for a string), and `read` converts them to the types of the schema.
"""

from __future__ import annotations

import copyreg
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any, cast, get_args, get_type_hints

from ..schema import PARTS, Checkpoint, Part
from .explain import keys_text
from .hydra_errors import HydraConfigError, built_text

#: Types of values that are not a config.
_PLAIN = (str, int, float, bool, list)


class _Derived(type):
    """Metaclass of the classes that `composable` makes from a `schema`."""

    schema: type

    def __subclasscheck__(cls, other: type) -> bool:
        """Answer OmegaConf, which asks before it merges a value into a config of this class.

        OmegaConf's own text would be that a str, or a SharedMemoryStager that `instantiate` built, is not a subclass of
        SharedMemoryStager.

        Raises:
            CheckpointConfigError: the value is an object, another part, or a plain value, which Hydra 1.3 merges before
                it calls the `_target_`
        """
        if super().__subclasscheck__(other) or ("schema" in vars(cls) and issubclass(other, cls.schema)):
            return True
        if other.__module__.startswith("ckpt_component.") and not hasattr(other, "_target_"):
            raise HydraConfigError(built_text("A part of the config", other))
        text = _unfit_text(cls.schema, other) if "schema" in vars(cls) else None
        if text:
            raise HydraConfigError(text)
        return False


class _FromSchema(metaclass=_Derived):
    """Base of the classes that `composable` makes."""


def composable(schema: type) -> type:
    """The dataclass for the config store, derived from the dataclass `schema`.

    A config of either class may be merged into one of the other: apps have `schema` in structured configs of their own.
    A process that unpickles a config, such as a launcher's worker, derives the class again.
    """
    derived = vars(schema).get("composable")
    if derived is None:
        hints = get_type_hints(schema)
        items = [_loosened(item, hints[item.name]) for item in fields(schema)]
        derived = make_dataclass(schema.__name__, items, bases=(_FromSchema, schema))
        derived.__module__, derived.__qualname__ = schema.__module__, f"{schema.__qualname__}.composable"
        derived.schema = schema  # type: ignore[attr-defined]
        type.__setattr__(schema, "composable", derived)
    return derived


def _reduced(derived: _Derived) -> tuple[Any, ...]:
    return composable, (derived.schema,)


copyreg.pickle(_Derived, _reduced)


def _loosened(item: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    default, factory, kind = item.default, item.default_factory, hint
    if is_dataclass(hint):
        kind = factory = cast(Any, composable(cast(type, hint)))
    elif is_enum(hint):
        kind, default = Any, default.name
    elif item.metadata.get("path"):
        kind = Any  # a string or a Path
    elif item.metadata.get("unit"):
        kind = int | float | str | None if type(None) in get_args(hint) else int | float | str
    if factory is not MISSING:
        return item.name, kind, field(default_factory=factory)
    return item.name, kind, field(default=default)


def _unfit_text(schema: type, other: type) -> str | None:
    """The text for a value of type `other` in the place of a node of Checkpoint; None if OmegaConf's own must do."""
    other = getattr(other, "schema", other)
    for kind, options in PARTS.items():
        if schema in options.values() and (issubclass(other, Part) or other in _PLAIN):
            choice = next((option for option, part in options.items() if part is other), "...")
            return (
                f"checkpoint.{kind} is a {schema.__name__}, which a keyword of type {other.__name__} cannot replace; "
                f"use build_manager(cfg.checkpoint, ['checkpoint/{kind}={choice}']), or the same on the command line. "
                f"checkpoint/{kind} can be: {', '.join(options)}."
            )
    place = _place(schema, Checkpoint, "checkpoint")
    if place is None or other not in _PLAIN:
        return None
    return (
        f"{place} cannot itself be of type {other.__name__}. {keys_text(place, [item.name for item in fields(schema)])}"
    )


def _place(schema: type, within: type, name: str) -> str | None:
    """The dotted key of a node, by its schema."""
    if schema is within:
        return name
    hints = get_type_hints(within).items()
    inner = (_place(schema, cast(type, hint), f"{name}.{key}") for key, hint in hints if is_dataclass(hint))
    return next(filter(None, inner), None)


def is_enum(hint: Any) -> bool:
    """Whether a type hint is an enum."""
    return isinstance(hint, type) and issubclass(hint, Enum)
