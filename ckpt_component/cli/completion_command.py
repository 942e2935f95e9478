"""`ckpt completion SHELL`: a script that completes `ckpt` in a shell, made by shtab from the parser.

Print a completion script. It needs shtab: pip install shtab.

examples:
  ckpt completion bash > ~/.local/share/bash-completion/completions/ckpt
  ckpt completion zsh > FOLDER/_ckpt      # a folder of $fpath
  ckpt completion fish > ~/.config/fish/completions/ckpt.fish
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import CheckpointConfigError
from .output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that sources the script")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the script.

    Raises:
        CheckpointConfigError: shtab is not installed
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
