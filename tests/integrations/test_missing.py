"""An adapter whose framework is not installed says in one line what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "framework"),
    [
        ("accelerate", "accelerate"),
        ("transformers", "transformers"),
        ("lightning", "lightning pytorch_lightning"),
        ("submitit", "submitit"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_a_missing_framework_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, adapter: str, framework: str
) -> None:
    packages = framework.split()
    for name in [*packages, *(name for name in sys.modules if name.partition(".")[0] in packages)]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith(f"ckpt_component.integrations.{adapter}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"pip install '{adapter}>=\d") as caught:
        importlib.import_module(f"ckpt_component.integrations.{adapter}")
    assert "\n" not in str(caught.value)
