"""`ckpt recipes [NAME]`: overlays for common purposes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ...config.files import recipes
from ...errors import CheckpointConfigError
from ...spelling import closest
from .output import Output, entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  ckpt recipes\n  ckpt recipes safest        # what it sets"
    parser.add_argument("name", nargs="?", help="print this recipe")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the recipes, or one of them.

    Raises:
        CheckpointConfigError: There is no such recipe.
    """
    files = {file.name: file for file in recipes()}
    if parsed.name is not None:
        if parsed.name not in files:
            near = closest(parsed.name, files)
            hint = f"did you mean ckpt recipes {near}?" if near else "ckpt recipes lists them."
            raise CheckpointConfigError(f"There is no recipe {parsed.name}; {hint}")
        text = files[parsed.name].path.read_text(encoding="utf-8")
        output.result({"name": parsed.name, "path": str(files[parsed.name].path), "content": text}, text.splitlines)
        return
    data = [{"name": file.name, "text": file.line, "path": str(file.path)} for file in files.values()]
    output.result(data, lambda: _lines(data, output))


def _lines(data: list[dict[str, Any]], output: Output) -> Iterator[str]:
    for recipe in data:
        yield from entry(output, recipe["name"], "", recipe["text"])
    yield ""
    yield "On a command line: +recipe=NAME. Details: ckpt recipes NAME, and ckpt explain +recipe=NAME."
