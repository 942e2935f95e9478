"""Every key and every override that an error, a warning or a log line of the package names is one that can be typed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from strides import in_turn

import ckpt_component
from ckpt_component.config import compose_checkpoint, resolve_config
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
        return  # each worker reads all modules before its first test
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
TEXTS = [text for path in sorted(PACKAGE.rglob("*.py")) if path != OTHER_CONFIG for text in texts(path)]
OVERRIDES = sorted({found.rstrip(".:") for text in TEXTS for found in OVERRIDE.findall(text)})
KEYS = sorted({found for text in TEXTS for found in KEY.findall(text) if not found.endswith(".pt")})  # a file
CONFIG = {"checkpoint": OmegaConf.to_container(compose_checkpoint("async_zero_overhead", []))}
#: For a value or an option that a text leaves open.
OPTIONS = {
    "checkpoint/stager": "pinned",
    "checkpoint/caller": "inline",
    "checkpoint/writer": "dcp",
    "checkpoint/recovery": "host",
}


def default_of(key: str) -> Any:
    value: Any = CONFIG
    for name in key.split("."):
        value = value[name]
    return "null" if value is None else value


def test_there_is_advice_to_look_at() -> None:
    assert len(OVERRIDES) > 40 and len(KEYS) > 15


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize("advice", in_turn(OVERRIDES, 2))
def test_an_override_that_a_text_names_works(advice: str) -> None:
    key, _, value = advice.partition("=")
    if OPEN.search(value):
        value = OPTIONS.get(key) or OPEN.sub("0" if "/" in value else str(default_of(key)), value)
    # Uploads are from a local folder.
    others = ["checkpoint.local.dir=/scratch/run"] if key.startswith("checkpoint.upload.") else []
    resolve_config("async_zero_overhead", [f"{key}={value}", *others])


def test_keys_that_a_text_names_are_keys() -> None:
    known = {key for keys in dotted_keys(CONFIG) for key in [keys, *_above(keys)]}
    known |= {*REMOVED}
    assert [key for key in KEYS if key not in known and f"checkpoint.{key}" not in known] == []


def _above(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))
