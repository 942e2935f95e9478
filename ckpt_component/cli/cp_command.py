"""`ckpt cp SRC DST`: copy a checkpoint, verified, so that the copy is whole or not there.

Copy a checkpoint. The copy is verified, durable, and appears whole or not at all. Repeated after it was cut off, the
command finishes.

example:
  ckpt cp checkpoints@200 backup/
  ckpt cp checkpoints@best other@300

ROOT@300 as DST: only for formats whose files do not hold the step. A
step inside the training state stays as it is.
--commit manifest is for a mounted object store.
"""

from __future__ import annotations

import argparse

from ..core.commit.manifest import read_manifest
from ..core.commit.names import MANIFEST
from ..core.progress import progress_bar
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointNotFoundError
from ..formats.checkpoints import find_checkpoint
from .output import Output
from .roots import add_safeguards, destination, place_of, shown, tree_bytes, typed_errors
from .transfer import Transfer


def add_arguments(parser: argparse.ArgumentParser, verb: str = "copy") -> None:
    """Add the arguments of the command; `mv` has the same."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint: ROOT/iter_0000200, ROOT@200, ROOT@newest")
    parser.add_argument(
        "target",
        metavar="DST",
        help="a new path, an existing folder or FOLDER/ to put it into, or ROOT@300: as step 300",
    )
    parser.add_argument("--commit", choices=["rename", "manifest"], help="how the copy appears (as others in its root)")
    add_safeguards(parser, verb)


def run(parsed: argparse.Namespace, output: Output, *, moves: bool = False) -> None:
    """Copy, or move.

    Raises:
        CheckpointError: see `Transfer`
    """
    checkpoint = find_checkpoint(parsed.source, parsed.options)
    if moves and checkpoint.whole_root:
        raise CheckpointConfigError(
            f"{parsed.source} is a folder of checkpoints; name the one to move: {parsed.source}@{checkpoint.step}."
        )
    manifest = read_manifest(checkpoint.fs, checkpoint.path) if checkpoint.fs.is_folder(checkpoint.path) else None
    if manifest is None:
        raise CheckpointNotFoundError(
            f"{checkpoint.path} has no {MANIFEST}; for another program's files use cp or mv, or ckpt import."
        )
    source = place_of(checkpoint.path, parsed.options)
    target = destination(parsed.target, source, parsed.options, parsed.commit)
    done = "moved" if moves else "copied"
    renamed = False
    with typed_errors(f"{source.path} was not {done} to {target.path}"):
        work = Transfer(source, manifest, target, parsed.ended, progress_bar)
        work.refuse(moves=moves)
        nbytes, there = tree_bytes(source.fs, source.path), work.is_there
        if not parsed.dry_run and moves:
            renamed = work.move()
        elif not parsed.dry_run:
            work.copy()
    result = {"from": source.path, "to": target.path, "bytes": nbytes}
    result |= {"was_there": there, "renamed": renamed, "dry_run": parsed.dry_run}
    places = f"{shown(source.path)} to {shown(target.path)}: {amount(nbytes)}"
    text = f"{done} {places}, {'renamed' if renamed else 'verified'}"
    if parsed.dry_run:
        text = f"would {'move' if moves else 'copy'} {places}"
    output.result(result, [f"{text}{'; it was there already' if there else ''}"])
