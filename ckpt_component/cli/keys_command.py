"""`ckpt keys [PATTERN]`: every config key, from the schema.

List every key below `checkpoint`: type, default, range, and what it is for.

examples:
  ckpt keys timeout
  ckpt keys 'writer.*'
"""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..config.keys import Key, keys
from ..config.schema import PARTS
from ..core.spelling import closest
from ..errors import CheckpointConfigError
from .output import Output, entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="only keys with this in their name or text; * is any text"
    )


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the keys.

    Raises:
        CheckpointConfigError: no key matches
    """
    matching = [key for key in keys() if parsed.pattern is None or _matches(key, parsed.pattern)]
    if not matching:
        names = {name for key in keys() for name in (key.name, *key.name.split("."))}
        near = closest(parsed.pattern.removeprefix("checkpoint."), sorted(names))
        hint = f"try ckpt keys {near}" if near else "ckpt keys lists all"
        raise CheckpointConfigError(f"No key has {parsed.pattern!r} in its name or text; {hint}.")
    data = [{**asdict(key), "name": f"checkpoint.{key.name}"} for key in matching]
    output.result(data, _lines(matching, output))


def _matches(key: Key, pattern: str) -> bool:
    pattern = pattern.lower().removeprefix("checkpoint.")
    glob = pattern if "*" in pattern else f"*{pattern}*"
    return any(fnmatch.fnmatchcase(text, glob) for text in (key.name, key.text.lower()))


def _lines(matching: list[Key], output: Output) -> Iterator[str]:
    # Parts have keys in common, and those of one name differ in the default at most.
    options: dict[tuple[Any, ...], list[str]] = {}
    for key in matching:
        options.setdefault((key.name, key.kind, key.default, key.limits, key.text), []).append(key.option)
    for (name, kind, default, limits, text), of in options.items():
        part = name.partition(".")[0]
        some = of != [""] and set(of) != set(PARTS[part])
        facts = f"{kind.replace('|', ', ')}{f', {limits}' if limits else ''}"
        facts += f", with checkpoint/{part}={','.join(of)}" if some else ""
        yield from entry(output, f"checkpoint.{name}={default}", f"({facts})", _plain(text))


def _plain(text: str) -> str:
    """A text of the schema without its Markdown, which is for the page of keys."""
    return re.sub(r"\[[^\]]*\]\(([\w./-]+\.md)[^)]*\)", r"docs/\1", text).replace("`", "")
