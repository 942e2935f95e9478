"""The schema says everything once: documented keys, and the same keys and defaults as the classes."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
from omegaconf import OmegaConf

from ckpt_component import CheckpointConfigError
from ckpt_component.config import config_dir, schema
from ckpt_component.config.hydra.parts import part_class
from ckpt_component.config.schema import PARTS, Part, part_option
from ckpt_component.core.options import Range

LEAVES = [(kind, option) for kind in PARTS for option in PARTS[kind]]
OWN_PARTS = [PARTS[kind][option] for kind, option in LEAVES]
CLASSES = [
    value
    for value in vars(schema).values()
    if inspect.isclass(value) and is_dataclass(value) and value.__module__ == schema.__name__
]


def constructor(kind: str, option: str) -> dict[str, inspect.Parameter]:
    target = f"ckpt_component.{kind}s.{PARTS[kind][option].__name__}"
    cls = part_class(kind, {"_target_": target}, object)
    return dict(inspect.signature(cls).parameters)


def test_parts_take_the_keys_of_their_schemas_with_the_same_defaults_and_words() -> None:
    def plain(value: Any) -> Any:
        return (value.name, list(type(value).__members__)) if isinstance(value, Enum) else value

    for kind, option in LEAVES:
        parameters = constructor(kind, option)
        assert inspect.Parameter.VAR_KEYWORD not in {entry.kind for entry in parameters.values()}
        items = [item for item in fields(PARTS[kind][option]) if item.name != "_target_"]
        defaults = {name: plain(entry.default) for name, entry in parameters.items()}
        assert list(defaults) == [item.name for item in items], option
        assert defaults == {item.name: plain(item.default) for item in items}, option


def test_every_key_is_documented_in_one_line_and_every_number_has_a_range() -> None:
    for cls in CLASSES:
        (tree,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and not (cls in OWN_PARTS and "_target_" in ast.unparse(statement)):
                text = ast.unparse(statement)
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), text
                assert isinstance(following.value.value, str) and "\n" not in following.value.value
        for item in fields(cls):
            if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
                assert "range" in item.metadata, f"{cls.__name__}.{item.name}"


def test_parts_refuse_what_is_out_of_the_range_of_their_schema() -> None:
    for kind, option in LEAVES:
        cls = part_class(kind, {"_target_": f"ckpt_component.{kind}s.{PARTS[kind][option].__name__}"}, object)
        for item in fields(PARTS[kind][option]):
            if "range" in item.metadata:
                with pytest.raises(CheckpointConfigError, match=f"checkpoint.{kind}.{item.name} must be .*, got -1"):
                    cls(**{item.name: -1})


def test_ranges() -> None:
    assert str(Range(1)) == "at least 1" and str(Range(0, 9)) == "from 0 to 9"
    assert str(Range.finite_above(0)) == "a finite number above 0"
    assert None in Range(1) and 1 in Range(1) and 0 not in Range(1) and math.nan not in Range(1)
    assert 9 in Range(0, 9) and 10 not in Range(0, 9)
    assert all(value not in Range.finite_above(0) for value in (0, math.inf, math.nan)) and 1e-9 in Range.finite_above(
        0
    )


def test_schemas_of_parts_derive_from_part() -> None:
    assert all(issubclass(cls, Part) for options in PARTS.values() for cls in options.values())


def test_a_part_has_the_class_of_its_file() -> None:
    for kind, option in LEAVES:
        file = OmegaConf.load(config_dir() / "checkpoint" / kind / f"{option}.yaml")
        assert PARTS[kind][option]()._target_ == file._target_
        assert part_option(kind, file._target_) == option


def test_an_option_is_known_by_its_class() -> None:
    for target, option in {
        "ckpt_component.stagers.PinnedStager": "pinned",
        "ckpt_component.stagers.LiveStager": "none",
        "ckpt_component.writers.PinnedStager": None,
        "my_app.stagers.PinnedStager": None,
        "PinnedStager": None,
    }.items():
        assert schema.part_option("stager", target) == option, target
