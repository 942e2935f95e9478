"""The schema says everything once: documented keys, and the same keys and defaults as the classes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

from ckpt_component.config import schema
from ckpt_component.config.parts import part_class
from ckpt_component.config.schema import PARTS, Part

LEAVES = [(kind, option) for kind in PARTS for option in PARTS[kind]]
CLASSES = [
    value
    for value in vars(schema).values()
    if inspect.isclass(value) and is_dataclass(value) and value.__module__ == schema.__name__
]


def constructor(kind: str, option: str) -> dict[str, inspect.Parameter]:
    target = f"ckpt_component.{kind}s.{PARTS[kind][option].__name__}"
    cls = part_class(kind, {"_target_": target}, object)
    return dict(inspect.signature(cls).parameters)


@pytest.mark.parametrize(("kind", "option"), LEAVES)
def test_a_part_takes_exactly_the_keys_of_its_schema(kind: str, option: str) -> None:
    parameters = constructor(kind, option)
    assert list(parameters) == [item.name for item in fields(PARTS[kind][option]) if item.name != "_target_"]
    assert inspect.Parameter.VAR_KEYWORD not in {entry.kind for entry in parameters.values()}


@pytest.mark.parametrize(("kind", "option"), LEAVES)
def test_a_part_has_the_defaults_of_its_schema(kind: str, option: str) -> None:
    def plain(value: Any) -> Any:
        return value.name if isinstance(value, Enum) else value

    parameters = constructor(kind, option)
    defaults = {item.name: plain(item.default) for item in fields(PARTS[kind][option]) if item.name != "_target_"}
    assert {name: plain(entry.default) for name, entry in parameters.items()} == defaults


@pytest.mark.parametrize(("kind", "option"), LEAVES)
def test_an_enum_has_the_same_members_on_both_sides(kind: str, option: str) -> None:
    for name, entry in constructor(kind, option).items():
        if isinstance(entry.default, Enum):
            ours = next(item.default for item in fields(PARTS[kind][option]) if item.name == name)
            assert list(type(entry.default).__members__) == list(type(ours).__members__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_key_is_documented_in_one_line(cls: type) -> None:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), ast.unparse(statement)
            assert "\n" not in following.value.value


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_has_a_range(cls: type) -> None:
    for item in fields(cls):
        if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
            assert schema.range_of(cls, item.name), f"{cls.__name__}.{item.name}"


def test_schemas_of_parts_derive_from_part() -> None:
    assert all(issubclass(cls, Part) for options in PARTS.values() for cls in options.values())


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("ckpt_component.stagers.PinnedStager", "pinned"),
        ("ckpt_component.stagers.LiveStager", "none"),
        ("ckpt_component.writers.PinnedStager", None),
        ("my_app.stagers.PinnedStager", None),
        ("PinnedStager", None),
    ],
)
def test_an_option_is_known_by_its_class(target: str, option: str | None) -> None:
    assert schema.part_option("stager", target) == option
