"""Every key and every override that an error, a warning or a log line of the package names is one that can be typed."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_configs import compose_once
from omegaconf import OmegaConf
from strides import first_of

import ckpt_component
from ckpt_component import CheckpointError
from ckpt_component.config import resolve_config
from ckpt_component.config.hydra.explain import REMOVED, dotted_keys

PACKAGE = Path(ckpt_component.__file__).parent
OVERRIDE = re.compile(r"\+?checkpoint(?:/\w+|(?:\.[a-z_]+)+)=[^\s,;)?'`|]*")
KEY = re.compile(r"(?<![\w.])(?:checkpoint|timeouts)(?:\.[a-z_]+)+(?![\w/=(*])")
#: What a module has at least that names a key.
NAMED = re.compile(r"\bcheckpoint[./]|\btimeouts\.")
#: What a text leaves open: `{}` of an f-string or of `format`, `%s` of a log line, and `<new folder>`.
OPEN = re.compile(r"\{[\w.:]*\}|%[a-z]|<new\b.*|\$\{[^}]*\}")


def texts(path: Path) -> Iterator[str]:
    """The strings of a module without its docstrings; what an f-string puts in is `{}`."""
    source = path.read_text()
    if not NAMED.search(source):
        return
    nodes, passed = [*ast.walk(ast.parse(source))], set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            passed.update(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.value


#: torchtitan's own config has a section `checkpoint` too.
OTHER_CONFIG = PACKAGE / "integrations" / "torchtitan.py"


@functools.cache
def all_texts() -> list[str]:
    return [text for path in sorted(PACKAGE.rglob("*.py")) if path != OTHER_CONFIG for text in texts(path)]


def config() -> dict[str, Any]:
    return {"checkpoint": OmegaConf.to_container(compose_once("async_zero_overhead"))}


#: For a value or an option that a text leaves open.
OPTIONS = {
    "checkpoint/stager": "pinned",
    "checkpoint/caller": "inline",
    "checkpoint/writer": "dcp",
    "checkpoint/recovery": "host",
}


def default_of(key: str) -> Any:
    value: Any = config()
    for name in key.split("."):
        value = value[name]
    return "null" if value is None else value


@pytest.mark.slow
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_overrides_that_texts_name_work(stride: int) -> None:
    overrides = sorted({found.rstrip(".:") for text in all_texts() for found in OVERRIDE.findall(text)})
    assert len(overrides) > 40
    wrong = dict[str, str]()
    for advice in overrides[first_of(stride) - 1 :: stride]:
        key, _, value = advice.partition("=")
        if OPEN.search(value):
            value = OPTIONS.get(key) or OPEN.sub("0" if "/" in value else str(default_of(key)), value)
        # Uploads are from a local folder, and what is published goes somewhere.
        others = ["checkpoint.local.dir=/scratch/run"] if key.startswith("checkpoint.upload.") else []
        if key.startswith("checkpoint.publish.") and key != "checkpoint.publish.to":
            others.append("checkpoint.publish.to=/shared/weights")
        try:
            resolve_config("async_zero_overhead", [f"{key}={value}", *others])
        except CheckpointError as error:
            wrong[advice] = str(error)
    assert wrong == {}


@pytest.mark.slow
def test_keys_that_texts_name_are_keys() -> None:
    # Not the name of a file.
    keys = {found for text in all_texts() for found in KEY.findall(text) if not found.endswith(".pt")}
    assert len(keys) > 15
    known = {key for dotted in dotted_keys(config()) for key in [dotted, *_above(dotted)]}
    known |= {*REMOVED}
    assert [key for key in sorted(keys) if key not in known and f"checkpoint.{key}" not in known] == []


def _above(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))
