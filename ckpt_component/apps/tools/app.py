"""`ckpt`: reads the command line and runs one of the commands."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...errors import CheckpointError
from ...saving.folders import expanded
from . import report_command, tune_command

#: In the order of the help. A command has `add(commands)`, which sets `run` to what gets the parsed arguments.
_COMMANDS = (report_command, tune_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: instead of those of the process.

    Raises:
        SystemExit: with code 1 and the text of what went wrong, or with 2 when the words cannot be understood.
    """
    # What a command has made in other places is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        parsed = parse(arguments)
        parsed.run(parsed)
    except CheckpointError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line in parts; `run` is the command's function, which takes them. Folders have no `~` any more."""
    parser = argparse.ArgumentParser(prog="ckpt", description="What one does beside a run of training.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    parsed = parser.parse_args(arguments)
    for name, value in vars(parsed).items():
        if isinstance(value, Path):
            setattr(parsed, name, Path(expanded(value, name)))
    return parsed
