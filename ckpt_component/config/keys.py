"""Every key of a checkpoint config as data, from the schema: for `ckpt keys` and docs/configuration.md.

Imports neither Hydra nor OmegaConf.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import MISSING as NOTHING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from . import schema as module
from .quantities import BYTES, SECONDS
from .schema import PARTS


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: below `checkpoint`, with dots: `save.every_steps`, `writer.workers`
        option: the part that has the key, such as `dcp`; empty for keys of `checkpoint` itself
        kind: its type in words, such as `int or null`, `bytes`, `rename|manifest`
        default: its default, as it is typed
        limits: the range of a number, in words; empty: none
        text: what it is for, one line
    """

    name: str
    option: str
    kind: str
    default: str
    limits: str
    text: str


def keys() -> Iterator[Key]:
    """All keys: those of `checkpoint`, then those of each option of `checkpoint/<kind>`."""
    texts = _texts()
    yield from _keys_of(module.Checkpoint, "", "", texts)
    for kind, options in PARTS.items():
        for option, schema in options.items():
            yield from _keys_of(schema, f"{kind}.", option, texts)


def _keys_of(schema: type, prefix: str, option: str, texts: dict[str, dict[str, str]]) -> Iterator[Key]:
    text_of = {name: text for base in reversed(schema.__mro__) for name, text in texts.get(base.__name__, {}).items()}
    hints = get_type_hints(schema)
    for field in fields(schema):
        if field.name in ("_target_", "_recursive_", *PARTS):
            continue
        default = field.default_factory() if field.default_factory is not NOTHING else field.default
        name = prefix + field.name
        if is_dataclass(default) and not isinstance(default, type):
            yield from _keys_of(type(default), f"{name}.", option, texts)
            continue
        kind = _kind(hints[field.name], field.metadata.get("unit"))
        limits = str(field.metadata.get("range", ""))
        yield Key(name, option, kind, typed_value(default), limits, text_of[field.name])


def typed_value(value: Any) -> str:
    """A value as it is typed after `key=`."""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any, unit: str | None) -> str:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if get_origin(hint) is not list else []
    null = " or null" if (len(get_args(hint)) > len(kinds) and kinds) or hint is Any else ""
    if unit in (BYTES, SECONDS):
        return str(unit) + null
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(hint.__members__)
    names = {str: "text", bool: "true|false", list: "list", Any: "dict"}
    return (
        " or ".join(names.get(get_origin(kind) or kind, getattr(kind, "__name__", "")) for kind in kinds or [hint])
        + null
    )


def _texts() -> dict[str, dict[str, str]]:
    """Class of the schema -> its key -> the text below it."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = {
                ast.unparse(item.target): str(after.value.value)
                for item, after in itertools.pairwise(node.body)
                if isinstance(item, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            }
    return texts
