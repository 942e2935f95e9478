"""`ckpt keys`, `presets`, `recipes`, `completion`: what can be configured and typed. Without Hydra and torch."""

from __future__ import annotations

import argparse
import fnmatch
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config.config_files import parts_of, presets, recipes
from ..config.keys import Key, keys
from ..config.schema import PARTS
from ..core.spelling import closest
from ..errors import CheckpointConfigError
from .output import Output, entry, width


def keys_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="only keys with this in their name or text; * is any text"
    )


def run_keys(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt keys [PATTERN]`: every config key, from the schema.

    List every key below `checkpoint`: type, default, range, and what it is for.

    examples:
      ckpt keys timeout
      ckpt keys 'writer.*'
    """
    matching = [key for key in keys() if parsed.pattern is None or _matches(key, parsed.pattern)]
    if not matching:
        names = {name for key in keys() for name in (key.name, *key.name.split("."))}
        near = closest(parsed.pattern.removeprefix("checkpoint."), sorted(names))
        hint = f"try ckpt keys {near}" if near else "ckpt keys lists all"
        raise CheckpointConfigError(f"No key has {parsed.pattern!r} in its name or text; {hint}.")
    data = [{**asdict(key), "name": f"checkpoint.{key.name}"} for key in matching]
    output.result(data, _key_lines(matching, output))


def _matches(key: Key, pattern: str) -> bool:
    pattern = pattern.lower().removeprefix("checkpoint.")
    glob = pattern if "*" in pattern else f"*{pattern}*"
    return any(fnmatch.fnmatchcase(text, glob) for text in (key.name, key.text.lower()))


def _key_lines(matching: list[Key], output: Output) -> Iterator[str]:
    # Parts have keys in common, and those of one name differ in the default at most.
    options: dict[tuple[Any, ...], list[str]] = {}
    for key in matching:
        options.setdefault((key.name, key.kind, key.default, key.limits, key.text), []).append(key.option)
    for (name, kind, default, limits, text), of in options.items():
        part = name.partition(".")[0]
        some = of != [""] and set(of) != set(PARTS[part])
        facts = f"{kind.replace('|', ', ')}{f', {limits}' if limits else ''}"
        facts += f", with checkpoint/{part}={','.join(of)}" if some else ""
        yield from entry(output, f"checkpoint.{name}={default}", f"({facts})", _unmarked(text))


def _unmarked(text: str) -> str:
    """A text of the schema without its Markdown, which is for the page of keys."""
    return re.sub(r"\[[^\]]*\]\(([\w./-]+\.md)[^)]*\)", r"docs/\1", text).replace("`", "")


_USES = {
    "presets": 'In Python: build_manager("NAME"). On a command line: checkpoint=NAME. Details: ckpt explain NAME.',
    "recipes": "On a command line: +recipe=NAME. Details: ckpt explain +recipe=NAME.",
}


def presets_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", help="print this one")


def run_presets(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt presets [NAME]` and `ckpt recipes [NAME]`: configs for common purposes.

    List them, each with what it is for, or print one.

    examples:
      ckpt presets
      ckpt recipes safest        # what it sets
    """
    command, name = parsed.command, parsed.name
    files = {file.name: file for file in (presets() if command == "presets" else recipes())}
    if name is None:
        data = [
            {"name": file.name, "text": file.line, "path": str(file.path)}
            | ({"parts": parts_of(file.name)} if command == "presets" else {})
            for file in files.values()
        ]
        output.result(data, _file_lines(command, data, output))
    elif name in files:
        text = files[name].path.read_text(encoding="utf-8")
        output.result({"name": name, "path": str(files[name].path), "content": text}, text.splitlines())
    else:
        near = closest(name, files)
        hint = f"did you mean ckpt {command} {near}?" if near else f"ckpt {command} lists them."
        raise CheckpointConfigError(f"There is no {command.removesuffix('s')} {name}; {hint}")


#: The same, of other files.
recipes_arguments, run_recipes = presets_arguments, run_presets


def _file_lines(command: str, data: list[dict[str, Any]], output: Output) -> Iterator[str]:
    for file in data:
        parts = ", ".join(f"{kind} {option}" for kind, option in file.get("parts", {}).items())
        yield from entry(output, file["name"], f"({parts})" if parts else "", file["text"])
    yield ""
    yield from textwrap.wrap(_USES[command], width())


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that sources the script")


def run_completion(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt completion SHELL`: a script that completes `ckpt` in a shell, made by shtab from the parser.

    Print a completion script. It needs shtab: pip install shtab.

    examples:
      ckpt completion bash > ~/.local/share/bash-completion/completions/ckpt
      ckpt completion zsh > FOLDER/_ckpt      # a folder of $fpath
      ckpt completion fish > ~/.config/fish/completions/ckpt.fish
    """
    try:
        import shtab
    except ImportError as error:
        raise CheckpointConfigError("Completion needs shtab: pip install shtab.") from error
    from .app import COMMANDS, parser_of

    parser = parser_of(list(COMMANDS))
    _complete_paths(parser, shtab.FILE)
    script = shtab.complete(parser, parsed.shell)
    output.result({"shell": parsed.shell, "script": script})
    if not output.as_json:
        print(script)  # with its tabs


def _complete_paths(parser: argparse.ArgumentParser, files: Any) -> None:
    """Complete files for arguments that are paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files)
        elif action.type is Path or action.metavar in ("ROOT", "CKPT", "CKPT|ROOT", "SRC", "DST", "FOLDER"):
            action.complete = files  # type: ignore[attr-defined]
