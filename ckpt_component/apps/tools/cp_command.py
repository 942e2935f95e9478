"""`ckpt cp SRC DST`: copy a checkpoint, verified, so that the copy is whole or not there."""

from __future__ import annotations

import argparse
import os

from ...errors import CheckpointConfigError, CheckpointNotFoundError
from ...progress import progress_bar
from ...storage.file_system import file_system
from ...storage.space import amount
from .checkpoints import find_checkpoint, is_checkpoint
from .output import Output
from .roots import destination, file_system_of, is_whole_root, place_of, point_to, shown, tree_bytes, typed_errors
from .transfer import Transfer

_MOVED = {False: ("copied", "would copy"), True: ("moved", "would move")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_places(parser, "copy")
    parser.description = (
        "Copy a checkpoint. The copy is verified, durable, and appears whole or not at all. Repeated after it was cut "
        "off, the command finishes."
    )
    parser.epilog = "example:\n  ckpt cp checkpoints@200 backup/\n  ckpt cp checkpoints@best other@300"


def add_places(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the arguments of `cp` and `mv`."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint: ROOT/iter_0000200, ROOT@200, ROOT@newest")
    parser.add_argument(
        "target",
        metavar="DST",
        help="a new path, an existing folder or FOLDER/ to put it into, or ROOT@300: as step 300",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare the checksums of a copy")
    parser.add_argument("--commit", choices=["rename", "manifest"], help="how the copy appears (as others in its root)")
    parser.add_argument("--ended", action="store_true", help="the run that owns the root, on another host, has ended")
    parser.add_argument("--dry-run", action="store_true", help=f"print what would happen and {verb} nothing")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Copy.

    Raises:
        CheckpointError: see `Transfer`.
    """
    transfer(parsed, output, moves=False)


def source_path(argument: str, *, moves: bool) -> str:
    """The checkpoint to copy or move; only a copy may be of the newest of a folder without naming it."""
    checkpoint = find_checkpoint(argument)
    if not os.path.isdir(checkpoint.path):
        raise CheckpointConfigError(f"{checkpoint.path} is a single file; use cp or mv for it.")
    if not is_checkpoint(file_system(durable=True), checkpoint.path):
        raise CheckpointNotFoundError(f"{checkpoint.path} is no checkpoint; ckpt ls shows what a folder holds.")
    if moves and is_whole_root(argument, checkpoint):
        raise CheckpointConfigError(
            f"{argument} is a folder of checkpoints; name the one to move: {argument}@{checkpoint.step}."
        )
    return checkpoint.path


def _finish_rename(parsed: argparse.Namespace, error: CheckpointNotFoundError) -> None:
    """Do what is left of a move that was cut off after its rename, and say that it was done, if it seems so."""
    fs = file_system(durable=True)
    _, at, step = parsed.source.rpartition("@")
    source = place_of(os.path.expanduser(parsed.source))
    if at and step.isdecimal():
        source = destination(fs, parsed.source, source)
    target = destination(fs, parsed.target, source)
    if target.path != source.path and is_checkpoint(fs, target.path) and os.path.isdir(target.path):
        point_to(fs, target)
        raise CheckpointNotFoundError(f"{error} {target.path} is there, perhaps moved before.") from error


def transfer(parsed: argparse.Namespace, output: Output, *, moves: bool) -> None:
    """Run `cp` or `mv`."""
    fs = file_system(durable=True)
    try:
        source = place_of(source_path(parsed.source, moves=moves))
    except CheckpointNotFoundError as error:
        if moves:
            _finish_rename(parsed, error)
        raise
    target = destination(fs, parsed.target, source)
    fs = file_system_of(target.root)
    if parsed.commit is not None:
        fs = file_system(durable=True, atomic_rename=parsed.commit == "rename")
    with typed_errors(f"{source.path} was not {_MOVED[moves][0]} to {target.path}"):
        work = Transfer(fs, source, target, not parsed.no_verify, parsed.ended, progress_bar)
        work.refuse(moves=moves)
        nbytes, there, renamed = tree_bytes(fs, source.path), work.is_there, False
        if not parsed.dry_run:
            if moves:
                renamed = work.move()
            else:
                work.copy()
    done = _MOVED[moves][parsed.dry_run]
    verified = not parsed.no_verify and not renamed
    result = {
        "from": source.path,
        "to": target.path,
        "bytes": nbytes,
        "was_there": there,
        "renamed": renamed,
        "verified": verified and not parsed.dry_run,
        "dry_run": parsed.dry_run,
    }
    how = "renamed" if renamed else "verified" if verified else "not verified"
    how = f", {how}" if not parsed.dry_run else ""
    note = "; it was there already" if there else ""
    text = f"{done} {shown(source.path)} to {shown(target.path)}: {amount(nbytes)}{how}{note}"
    output.result(result, lambda: [text])
