"""`ckpt`: parse the command line and run a subcommand."""

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

#: In the order of the help. `add(commands)` of a command sets `run` to a function of the parsed arguments.
_COMMANDS = (report_command, tune_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: The arguments; None: those of the process.

    Raises:
        SystemExit: With code 1 and the error text, or with 2 for invalid arguments.
    """
    # Exit normally on SIGTERM, so that commands remove their temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        parsed = parse(arguments)
        parsed.run(parsed)
    except CheckpointError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and expand `~` in paths; `run` of the result is the function of the subcommand."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Tools beside a training run.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    parsed = parser.parse_args(arguments)
    for name, value in vars(parsed).items():
        if isinstance(value, Path):
            setattr(parsed, name, Path(expanded(value, name)))
    return parsed
