"""`ckpt`: parse the command line and run a command.

Only the module of the chosen command is imported, so that `ckpt ls` starts as fast as Python does.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .._version import __version__
from ..core.spelling import closest
from ..core.storage.locate import is_url
from ..errors import CheckpointConfigError, CheckpointError, printable
from .config_words import is_override
from .output import Output, styled, width

#: What `ckpt` takes without a command.
_GLOBAL_OPTIONS = ("-h", "--help", "--version")
#: Exit codes: a check failed (damaged, different); the command could not do its work.
NO, FAILED = 1, 2

#: Command -> its module, here or by its full name, and a line of help, in the order of the help. For the command `ls`,
#: a module has `ls_arguments(parser)`, and `run_ls(parsed, output)`, which returns an exit code; None is 0. Its
#: docstring is a line for readers of the code, and, for `--help`, what the command does and examples.
COMMANDS = {
    "ls": ("list_commands", "list a folder of checkpoints: step, age, size, state; and what dead runs left"),
    "du": ("list_commands", "show what folders of checkpoints take, and what deleting a checkpoint would free"),
    "show": ("show_command", "show what a checkpoint holds, as a tree of keys; or its config"),
    "log": ("log_command", "show the runs of a folder: what each resumed from, changed, saved, and what failed"),
    "verify": ("verify_command", "compare all bytes of checkpoints with their checksums"),
    "diff": ("diff_command", "compare two checkpoints: keys, shapes, values by checksum or norm, configs"),
    "cp": ("change_commands", "copy a checkpoint, verified, whole or not at all"),
    "mv": ("change_commands", "move a checkpoint"),
    "rm": ("change_commands", "delete checkpoints, but never the last good one by accident"),
    "memory": ("memory_command", "list, show or drop the snapshots that runs have in the memory of this host"),
    "gc": ("change_commands", "delete what dead runs left, and old checkpoints"),
    "export": ("file_commands", "write files that other programs read: Hugging Face, safetensors, torch.save"),
    "pull": ("file_commands", "bring a folder of this host to a version of published weights, once or as they come"),
    "import": ("file_commands", "make a committed checkpoint from one of another program"),
    "explain": ("explain_command", "show what a config builds, and where each choice comes from"),
    "plan": ("plan_command", "predict what saving costs a run: memory, stall, storage rate, best interval"),
    "doctor": ("doctor_command", "check this machine, and a folder for checkpoints"),
    "presets": ("config_commands", "list the presets, or print one"),
    "recipes": ("config_commands", "list the recipes, or print one"),
    "keys": ("config_commands", "list every config key, with type, default and one line"),
    "report": ("run_commands", "what saving costs a run, or a comparison of the jobs of a sweep"),
    "watch": ("run_commands", "follow a run on one screen: steps, saves phase by phase, uploads, failures"),
    "trace": ("run_commands", "write the timeline of a run, for Perfetto and chrome://tracing"),
    "tune": ("ckpt_bench.tuning.command", "measure which settings suit this machine, a folder and a size of state"),
    "completion": ("config_commands", "print a script that completes ckpt in bash, zsh or fish"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the arguments; None: those of the process

    Raises:
        SystemExit: with the command's exit code; 2 after an error, whose text is on stderr
    """
    # Exit normally on SIGTERM, so that commands remove their temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        parsed = parse(arguments)
        level = logging.ERROR if parsed.quiet else max(logging.WARNING - 10 * parsed.verbose, logging.DEBUG)
        log = logging.StreamHandler(sys.stderr)
        log.setFormatter(_Formatter("%(message)s"))
        logging.basicConfig(level=level, handlers=[log])
        sys.exit(_of(parsed.command, "run_{}")(parsed, Output(as_json=parsed.json)) or 0)
    except CheckpointError as error:
        text, fix = str(error), ""
    except BrokenPipeError:  # `ckpt show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        text, fix = error.strerror or str(error), ""
        if is_url(str(error.filename or "")):
            from .machine_checks import in_words

            text, fix = in_words(error)
        text = f"{error.filename}: {text}" if error.filename else text
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(styled(f"error: {text}", "red", sys.stderr), *filter(None, [fix]), sep="\n  ", file=sys.stderr)
    sys.exit(FAILED)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and expand `~` in paths.

    Raises:
        CheckpointConfigError: there is no such command, or option of it
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        near = closest(chosen, COMMANDS)
        hint = f"did you mean ckpt {near}?" if near else "ckpt --help lists them."
        raise CheckpointConfigError(f"ckpt has no command '{chosen}'; {hint}")
    if not arguments:
        arguments = ["--help"]
    if chosen is None and arguments[0] not in _GLOBAL_OPTIONS:
        near = closest(arguments[0], _GLOBAL_OPTIONS)
        raise CheckpointConfigError(f"ckpt does not take '{arguments[0]}'; did you mean ckpt {near or '--help'}?")
    parser = parser_of([] if chosen is None else [chosen])
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = closest(unknown[0].partition("=")[0], parser.options_of(parsed.command))
        if is_override(unknown[0]) and isinstance(getattr(parsed, "config", None), list):
            near = f"--config {unknown[0]}"
        hint = f"did you mean {near}?" if near else f"ckpt {parsed.command} --help lists what it takes."
        raise CheckpointConfigError(f"ckpt {parsed.command} does not take '{unknown[0]}'; {hint}")
    parsed.options = dict(map(_option, parsed.options))
    for name, value in vars(parsed).items():
        if isinstance(value, Path):
            setattr(parsed, name, value.expanduser())
    return parsed


def _option(text: str) -> tuple[str, str]:
    """The key and the value of a storage option, which is not printed: it may be a secret."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CheckpointConfigError("-o takes KEY=VALUE, such as -o endpoint=http://127.0.0.1:9000")
    return key, value


def parser_of(complete: Sequence[str]) -> _Parser:
    """The parser of all commands, with the arguments of these; the modules of the others are not imported."""
    # Its own width is that of the terminal, however wide.
    formatter = partial(argparse.RawDescriptionHelpFormatter, width=width())
    parser = _Parser(
        prog="ckpt",
        formatter_class=formatter,
        description="Tools for checkpoints and runs.\nExit codes: 0 done, 1 a check failed, 2 an error.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (_, line) in COMMANDS.items():
        command = subparsers.add_parser(name, help=line, formatter_class=formatter)
        parser.commands[name] = command
        if name not in complete:
            continue
        _of(name, "{}_arguments")(command)
        text = inspect.getdoc(_of(name, "run_{}")) or "\n\n\n\n"  # none with python -OO
        _, description, command.epilog = text.split("\n\n", 2)
        command.description = textwrap.fill(description, width())
        command.add_argument(
            "-o",
            dest="options",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="for URLs, an option of the bucket (endpoint, region, allow_http ...); else the environment's count",
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv logs all")
        command.add_argument("-q", "--quiet", action="store_true", help="log errors only, and show no progress")
    return parser


class _Formatter(logging.Formatter):
    """Formats a log line of which a part may come from a file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class _Parser(argparse.ArgumentParser):
    """Raises its errors as typed ones of one line, without the usage.

    Attributes:
        commands: the parsers of its commands
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: dict[str, argparse.ArgumentParser] = {}

    def options_of(self, command: str) -> list[str]:
        """The long options of a command."""
        return re.findall(r"--[a-z][a-z-]+", self.commands[command].format_help())

    def error(self, message: str) -> NoReturn:
        raise CheckpointConfigError(f"{self.prog}: {message}; {self.prog} --help lists what it takes.")


def _of(command: str, name: str) -> Any:
    """The function of a command that has this name, with `{}` for the command."""
    module = COMMANDS[command][0]
    return getattr(
        importlib.import_module(module if "." in module else f".{module}", __package__), name.format(command)
    )
