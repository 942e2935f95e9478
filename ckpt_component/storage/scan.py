"""Which checkpoints exist under a root: the scan decides, the pointer file is only a hint."""

from __future__ import annotations

import logging
import os

from ..errors import CheckpointCorruptError
from .fs import FsOps
from .manifest import check_files, read_manifest
from .names import StepNames

logger = logging.getLogger(__name__)


def committed_steps(fs: FsOps, root: str, names: StepNames) -> list[int]:
    """The steps of committed checkpoints, oldest first.

    Committed: the folder has its final name, its manifest verifies, and every file has its size. A folder that
    fails this is skipped with a warning and left as it is.
    """
    steps = []
    for name in fs.names(root):
        step = names.step(name)
        if step is None:
            continue
        folder = os.path.join(root, name)
        try:
            manifest = read_manifest(fs, folder)
            if manifest is None:
                logger.warning("%s has no manifest, so it is not taken for a committed checkpoint", folder)
                continue
            check_files(fs, folder, manifest)
        except CheckpointCorruptError as error:
            logger.warning("%s is skipped: %s", folder, error)
            continue
        steps.append(step)
    return sorted(steps)


def write_pointer(fs: FsOps, root: str, names: StepNames, step: int) -> None:
    """Point to the newest committed step, for tools that look there; replaced atomically."""
    fs.write_over(os.path.join(root, names.pointer), f"{step}".encode())
