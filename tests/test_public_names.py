"""The names that `ckpt_component` promises, and that those of the last release are still there."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

import ckpt_component
import ckpt_component.errors

#: Of the last release.
RECORDED = Path(__file__).with_name("public_names.txt")
SCRIPT = Path(__file__).parent / "scripts" / "public_names.py"


def resolves(name: str) -> bool:
    """Whether a dotted path leads to something, as an import and then by attributes."""
    module, *attributes = name, ""
    while module:
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        return all((value := getattr(value, each, None)) is not None for each in filter(None, attributes))
    return False


def test_what_the_last_release_had_is_still_there() -> None:
    names = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    assert len(names) > 1000
    there = {*runpy.run_path(str(SCRIPT))["public_names"]()}
    gone = [name for name in names if name not in there]
    # A page may no longer name a path that is still there.
    assert [name for name in gone if not (name.startswith("name ") and resolves(name[5:]))] == []


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("ckpt_component.callers", True),
        ("ckpt_component.core.storage.storage.Storage", True),
        ("ckpt_component.CheckpointManager.save", True),
        ("ckpt_component.core.storage.storage.Stored", False),
        ("ckpt_component.storage", False),
    ],
)
def test_a_path_leads_to_something_or_does_not(name: str, is_there: bool) -> None:
    assert resolves(name) == is_there


@pytest.mark.parametrize("package", runpy.run_path(str(SCRIPT))["WITH_ALL"])
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(".".join(filter(None, ("ckpt_component", package))))
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert value is not None and name in dir(module)
        assert package or value.__name__ == name


def test_all_errors_are_public() -> None:
    assert set(ckpt_component.errors.__all__) < set(ckpt_component.__all__)


def test_a_star_import_gives_them_all(tmp_path: Path) -> None:
    code = "from ckpt_component import *\nimport ckpt_component as c\nassert set(c.__all__) <= set(globals())"
    (tmp_path / "script.py").write_text(code)
    done = run_program(["script.py"], tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'build_checkpoint'"):
        ckpt_component.build_checkpoint  # noqa: B018


def test_the_package_has_a_version() -> None:
    assert ckpt_component.__version__.count(".") == 2
