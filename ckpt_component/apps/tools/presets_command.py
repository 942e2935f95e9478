"""`ckpt presets`: the presets, and the parts that each picks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ...config.files import parts_of, presets
from .output import Output, entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "example:\n  ckpt presets        # then: ckpt explain async_zero_overhead"


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the presets."""
    data = [
        {"name": file.name, "text": file.line, "parts": parts_of(file.name), "path": str(file.path)}
        for file in presets()
    ]
    output.result(data, lambda: _lines(data, output))


def _lines(data: list[dict[str, Any]], output: Output) -> Iterator[str]:
    for preset in data:
        parts = ", ".join(f"{kind} {option}" for kind, option in preset["parts"].items())
        yield from entry(output, preset["name"], f"({parts})", preset["text"])
    yield ""
    yield 'In Python: build_manager("NAME"). On a command line: checkpoint=NAME. Details: ckpt explain NAME.'
