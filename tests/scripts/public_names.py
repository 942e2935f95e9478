"""Print all that users type, import or name in configs, a line each: `python tests/scripts/public_names.py`.

At a release, its output becomes `tests/public_names.txt`, with which later trees are compared. Run where what it imports
is that tree.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckpt_component
from ckpt_component.cli import app
from ckpt_component.config.config_files import config_dir, presets, recipe_dir, recipes
from ckpt_component.config.keys import keys

PACKAGE = Path(ckpt_component.__file__).parent
REPOSITORY = PACKAGE.parent
#: Modules whose `__all__` is public.
WITH_ALL: tuple[str, ...] = (
    "",
    "callers",
    "compat",
    "config",
    "errors",
    "events",
    "megatron",
    "publishing",
    "stagers",
    "testing",
)
WITH_ALL += ("testing.conformance", "writers")
#: Modules whose classes and functions are public, where frameworks are imported.
BY_SOURCE: tuple[str, ...] = tuple(f"events.{name}" for name in ("mlflow", "opentelemetry", "tensorboard", "wandb"))
BY_SOURCE += ("megatron.bridge", "testing.faults")
BY_SOURCE += tuple(
    f"integrations.{name}" for name in ("accelerate", "axolotl", "lightning", "submitit", "torchtitan", "transformers")
)
_PATH = re.compile(r"\bckpt_component(?:\.\w+)+")
_IMPORT = re.compile(r"^ *from (ckpt_component[\w.]*) import ([\w, ]+)$", re.M)


def modules() -> Iterator[str]:
    """Names of public modules, and of all that they list."""
    for module in WITH_ALL:
        name = ".".join(filter(None, ["ckpt_component", module]))
        yield name
        for each in importlib.import_module(name).__all__:
            yield f"{name}.{each}"
            if not module:
                yield from members(f"{name}.{each}", getattr(ckpt_component, each))
    for module in BY_SOURCE:
        tree = ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text())
        yield f"ckpt_component.{module}"
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                yield f"ckpt_component.{module}.{node.name}"


def members(name: str, value: Any) -> Iterator[str]:
    """The public attributes that a class of ours has, and the parameters of its constructor or of a function."""
    if inspect.isclass(value):
        of_ours = [each for each in value.__mro__ if each.__module__.startswith("ckpt_component")]
        found = {each for kind in of_ours for each in {*vars(kind), *getattr(kind, "__annotations__", ())}}
        for each in sorted(found):
            if not each.startswith("_"):
                yield f"{name}.{each}"
                yield from parameters(f"{name}.{each}", getattr(value, each, None))
    if not (inspect.isclass(value) and issubclass(value, BaseException)):
        yield from parameters(name, value)


def parameters(name: str, value: Any) -> Iterator[str]:
    """`NAME(PARAMETER)` for each parameter of a function or class."""
    if inspect.isfunction(value) or inspect.isclass(value):
        for each in inspect.signature(value).parameters:
            if each != "self" and not each.startswith("_"):
                yield f"{name}({each})"


def documented() -> Iterator[str]:
    """Paths that pages, configs and recipes name."""
    files = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/**/*.md")]
    files += [*config_dir().rglob("*.yaml"), *recipe_dir().rglob("*.yaml"), *PACKAGE.rglob("*.yaml")]
    files.append(PACKAGE / "config" / "schema.py")  # `_target_` of parts
    for file in files:
        text = file.read_text()
        yield from _PATH.findall(text)
        for module, names in _IMPORT.findall(text):
            yield from (f"{module}.{name.strip()}" for name in names.split(","))


def commands() -> Iterator[str]:
    """The commands of `ckpt`, and their options and arguments."""
    for command in app.COMMANDS:
        yield command
        for action in app.parser_of([command]).commands[command]._actions:
            for option in action.option_strings or [action.dest]:
                if option not in ("-h", "--help", argparse.SUPPRESS):
                    yield f"{command} {option}"


def public_names() -> Iterator[str]:
    """All of them, each with its kind."""
    names = sorted({*modules(), *documented()} - {"ckpt_component.saving", "ckpt_component.progress"})  # names of logs
    yield from (f"name {name}" for name in names)
    for preset in presets():
        yield f"preset {preset.name}"
    for recipe in recipes():
        yield f"recipe {recipe.path.relative_to(recipe_dir()).with_suffix('')}"
    for config in sorted(config_dir().rglob("*.yaml")):
        yield f"config {config.relative_to(config_dir()).with_suffix('')}"
    for key in keys():
        option = f" of {key.option}" if key.option else ""
        yield f"key {key.name}{option}"
        yield from (f"value {key.name}={word}{option}" for word in key.kind.split("|") if "|" in key.kind)
    yield from (f"command {command}" for command in commands())


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(public_names())))
