"""`ckpt completion SHELL`: a script that completes `ckpt` in a shell, made by shtab from the parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import CheckpointConfigError
from .output import Output

SHELLS = ("bash", "zsh", "fish")
#: Where a shell loads it from, to be appended to `ckpt completion SHELL`.
_HOMES = {
    "bash": "> ~/.local/share/bash-completion/completions/ckpt",
    "zsh": "> FOLDER/_ckpt, a folder of $fpath",
    "fish": "> ~/.config/fish/completions/ckpt.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Print a completion script. It needs shtab: pip install shtab."
    parser.epilog = "examples:\n" + "\n".join(f"  ckpt completion {shell} {home}" for shell, home in _HOMES.items())
    parser.add_argument("shell", choices=SHELLS)


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the script.

    Raises:
        CheckpointConfigError: shtab is not installed, or too old for the shell.
    """
    try:
        import shtab
    except ImportError as error:
        raise CheckpointConfigError("Completion needs shtab: pip install shtab.") from error
    from .app import COMMANDS, parser_of

    if parsed.shell not in shtab.SUPPORTED_SHELLS:
        raise CheckpointConfigError(
            f"shtab {shtab.__version__} does not support {parsed.shell}: pip install --upgrade shtab."
        )
    parser = parser_of(list(COMMANDS))
    _complete_paths(parser)
    script = shtab.complete(parser, parsed.shell)
    output.result({"shell": parsed.shell, "script": script}, script.splitlines)


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Complete files for arguments that are paths."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif action.type is Path or action.metavar in ("ROOT", "CKPT", "CKPT|ROOT", "SRC", "DST", "FOLDER"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
