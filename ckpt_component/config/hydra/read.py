"""Convert plain values to an instance of their schema: checks units, words, types, missing values and ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...core.spelling import invalid_choice
from ..quantities import quantity
from .composable import is_enum
from .hydra_errors import HydraConfigError

T = TypeVar("T")


def read(schema: type[T], values: Mapping[str, Any], name: str) -> T:
    """Convert values to an instance of a schema.

    Args:
        schema: a dataclass, whose fields may have a range and a unit; see `within`
        values: plain, nested values; for missing keys the schema's defaults apply
        name: prefix of the keys in error texts; empty for the top of a config

    Raises:
        CheckpointConfigError: a key has no value, or one of a wrong type or unit, or out of range
    """
    try:
        node = OmegaConf.merge(OmegaConf.structured(schema), _converted(schema, values, name))
    except OmegaConfBaseException as error:
        raise HydraConfigError(omegaconf_text(error, name)) from None
    missing = OmegaConf.missing_keys(node)
    if missing:
        raise HydraConfigError(missing_text(_full(name, min(missing))))
    instance = OmegaConf.to_object(node)
    _refuse_out_of_range(instance, name)
    return cast(T, instance)


def missing_text(key: str) -> str:
    """The text for a key without a value."""
    return f"{key} is missing; give it a value: {key}=..."


def omegaconf_text(error: OmegaConfBaseException, name: str) -> str:
    """The first line of OmegaConf's error, with the key in front."""
    key = getattr(error, "full_key", None) or ""
    full = key if key.startswith(name) else _full(name, key)
    line = next(iter(str(error).splitlines()), type(error).__name__)
    variable = re.fullmatch(r"Interpolation key '([A-Z][A-Z0-9_]*)' not found", line)
    hint = f" An environment variable is ${{oc.env:{variable[1]}}}." if variable else ""
    return f"{full}: {line.rstrip('.')}.{hint}"


def _converted(schema: type, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert quantities with units to numbers, and refuse words that are not members of the enum."""
    hints, items = get_type_hints(schema), {item.name: item for item in fields(schema)}
    result = dict(values)
    for key in result.keys() & items.keys():
        value, hint, unit = values[key], hints[key], items[key].metadata.get("unit")
        if is_dataclass(hint) and isinstance(value, Mapping):
            result[key] = _converted(cast(type, hint), value, _full(name, key))
        elif value == "???":
            continue
        elif unit and isinstance(value, str):
            result[key] = quantity(value, unit, _full(name, key))
        elif is_enum(hint):
            _refuse_other_words(_full(name, key), value, list(hint.__members__))
    return result


def _refuse_other_words(key: str, value: Any, words: list[str]) -> None:
    if isinstance(value, Enum) or value in words:
        return
    text = invalid_choice(key, "null" if value is None else value, words)
    if str(value) == "False" and "off" in words:  # a composed config has it as a string
        text += " YAML reads off as false; quote it: 'off'."
    raise HydraConfigError(text)


def _refuse_out_of_range(instance: Any, name: str) -> None:
    for item in fields(instance):
        key, value, limits = _full(name, item.name), getattr(instance, item.name), item.metadata.get("range")
        if is_dataclass(value):
            _refuse_out_of_range(value, key)
        elif limits is not None and value not in limits:
            raise HydraConfigError(f"{key} must be {limits}, got {value}.")


def _full(name: str, key: str) -> str:
    return ".".join(part for part in (name, key) if part)
