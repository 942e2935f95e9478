"""`ckpt mv SRC DST`: move a checkpoint, by a rename where that is possible.

Move a checkpoint: one rename, or, to another file system, a verified copy, and then the source is deleted. Repeated
after it was cut off, the command finishes. Checkpoints of a run that is alive are not moved.

example:
  ckpt mv checkpoints@200 /archive/
"""

from __future__ import annotations

from functools import partial

from . import cp_command

add_arguments = partial(cp_command.add_arguments, verb="move")
run = partial(cp_command.run, moves=True)
