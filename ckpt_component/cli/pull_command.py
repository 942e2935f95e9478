"""`ckpt pull SOURCE FOLDER`: bring a folder to a version of published weights, once or as they come.

Bring FOLDER on this host to a version of the weights that a training run publishes (checkpoint.publish.to). FOLDER is a
Hugging Face folder, whole at any time: the version is made beside it, verified, and exchanged with it in one step. Only
what changed is read where the source has it.

example:
  ckpt pull /shared/run/weights /local/model --wait 600
  ckpt pull s3://bucket/run/weights /local/model --follow

FOLDER needs room for the weights twice. --follow goes on until Ctrl-C or
SIGTERM, prints a line for each version, and skips what is older than the
newest. With --json it prints one object a line.
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import asdict
from typing import Any

from ..core.progress import progress_bar
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..publishing.local_copy import Pulled
from ..publishing.receiver import Receiver
from .output import Output
from .roots import shown
from .text import age_text, counted, duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("source", metavar="SOURCE", help="folder or URL of the versions; ckpt ls lists them")
    parser.add_argument("folder", metavar="FOLDER", help="the folder on this host; it is made if there is none")
    parser.add_argument("--follow", action="store_true", help="go on with each newer version")
    parser.add_argument("--version", dest="number", type=int, metavar="N", help="this version, not the newest")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="for the version, if it is not there yet (0)")
    parser.add_argument("--poll", type=float, metavar="SECONDS", help="between two looks of --follow (1)")
    parser.add_argument("--replace", action="store_true", help="take FOLDER over if it comes from another source")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Pull once, or follow.

    Raises:
        CheckpointConfigError: the arguments do not fit
        CheckpointError: see `Receiver`
    """
    _check(parsed)
    with Receiver(
        parsed.source, parsed.folder, options=parsed.options, replace=parsed.replace, progress=progress_bar
    ) as receiver:
        if parsed.follow:
            _follow(receiver, 1.0 if parsed.poll is None else parsed.poll, output)
            return
        pulled = receiver.pull(parsed.number, parsed.wait or 0.0)
        output.result(_data(pulled), [_line(pulled)])


def _check(parsed: argparse.Namespace) -> None:
    for name in ("wait", "poll"):
        value = getattr(parsed, name)
        if value is not None and not value >= 0:
            raise CheckpointConfigError(f"--{name}={value}: give seconds, 0 or above.")
    if parsed.follow and parsed.number is not None:
        raise CheckpointConfigError("--follow goes on with the newest version; leave --version out.")
    if parsed.follow and parsed.wait is not None:
        raise CheckpointConfigError("--follow waits for versions as long as it runs; leave --wait out.")
    if parsed.poll is not None and not (parsed.follow and parsed.poll > 0):
        raise CheckpointConfigError(f"--poll={parsed.poll} is for --follow, in seconds above 0.")


def _follow(receiver: Receiver, poll_seconds: float, output: Output) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it, and with success
    try:
        for pulled in receiver.follow(poll_seconds):
            output.record(_data(pulled), _line(pulled))
    except KeyboardInterrupt:
        return


def _data(pulled: Pulled) -> dict[str, Any]:
    """What `--json` prints: how many tensors changed, not which."""
    return asdict(pulled) | {"changed": None if pulled.changed is None else len(pulled.changed)}


def _line(pulled: Pulled) -> str:
    """`version 7, step 700: 12.34 MB in 0.52 s, 3 s after its commit`."""
    step = "" if pulled.step is None else f", step {pulled.step}"
    if not pulled.nbytes:
        return f"version {pulled.version}{step}: {shown(pulled.path)} has it already"
    what = "whole" if pulled.changed is None else f"{counted(len(pulled.changed), 'tensor')} changed"
    lag = "" if pulled.lag is None else f", {age_text(pulled.lag)} after the commit"
    return f"version {pulled.version}{step}: {what}, {amount(pulled.nbytes)} in {duration(pulled.seconds)}{lag}"
