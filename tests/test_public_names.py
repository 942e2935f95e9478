"""The names that `ckpt_component` promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program

import ckpt_component
import ckpt_component.errors


def test_every_public_name_is_there() -> None:
    for name in ckpt_component.__all__:
        assert getattr(ckpt_component, name).__name__ == name
        assert name in dir(ckpt_component)


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
