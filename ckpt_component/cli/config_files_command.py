"""`ckpt presets [NAME]` and `ckpt recipes [NAME]`: configs for common purposes.

List them, each with what it is for, or print one.

examples:
  ckpt presets
  ckpt recipes safest        # what it sets
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import Any

from ..config.config_files import parts_of, presets, recipes
from ..core.spelling import closest
from ..errors import CheckpointConfigError
from .output import Output, entry, width

_USES = {
    "presets": 'In Python: build_manager("NAME"). On a command line: checkpoint=NAME. Details: ckpt explain NAME.',
    "recipes": "On a command line: +recipe=NAME. Details: ckpt explain +recipe=NAME.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", help="print this one")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print all names with what they are for, or one file.

    Raises:
        CheckpointConfigError: there is no file of this name
    """
    command, name = parsed.command, parsed.name
    files = {file.name: file for file in (presets() if command == "presets" else recipes())}
    if name is None:
        data = [
            {"name": file.name, "text": file.line, "path": str(file.path)}
            | ({"parts": parts_of(file.name)} if command == "presets" else {})
            for file in files.values()
        ]
        output.result(data, _lines(command, data, output))
    elif name in files:
        text = files[name].path.read_text(encoding="utf-8")
        output.result({"name": name, "path": str(files[name].path), "content": text}, text.splitlines())
    else:
        near = closest(name, files)
        hint = f"did you mean ckpt {command} {near}?" if near else f"ckpt {command} lists them."
        raise CheckpointConfigError(f"There is no {command.removesuffix('s')} {name}; {hint}")


def _lines(command: str, data: list[dict[str, Any]], output: Output) -> Iterator[str]:
    for file in data:
        parts = ", ".join(f"{kind} {option}" for kind, option in file.get("parts", {}).items())
        yield from entry(output, file["name"], f"({parts})" if parts else "", file["text"])
    yield ""
    yield from textwrap.wrap(_USES[command], width())
