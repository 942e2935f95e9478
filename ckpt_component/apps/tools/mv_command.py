"""`ckpt mv SRC DST`: move a checkpoint, by a rename where that is possible.

Move a checkpoint: one rename, or, to another file system, a verified copy, and then the source is deleted. Repeated
after it was cut off, the command finishes. Checkpoints of a run that is alive are not moved.

example:
  ckpt mv checkpoints@200 /archive/
"""

from __future__ import annotations

import argparse

from .cp_command import add_places, transfer
from .output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_places(parser, "move")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Move.

    Raises:
        CheckpointError: see `Transfer`.
    """
    transfer(parsed, output, moves=True)
