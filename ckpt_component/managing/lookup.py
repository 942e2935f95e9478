"""What a starting run may find beside its own checkpoints: another naming, other programs, a path to resume from."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..errors import CheckpointNotFoundError
from ..spelling import typed
from ..storage.fs import FsOps
from ..storage.manifest import read_manifest
from ..storage.names import MANIFEST, NAMINGS, SINGLE_FILES, step_in_name
from ..storage.safe_open import read_failure
from ..storage.scan import Scan, foreign_checkpoints, read_pointer, scan_steps
from .run_context import RunContext, steps_text

logger = logging.getLogger(__name__)

_FROM_SCRATCH = "to start from scratch, a new checkpoint.dir"


#: The steps committed under the other naming, with its name; None: none are. See `committed_under_other_names`.
OtherNaming = tuple[str, Sequence[int]] | None


def refuse_absent_step(step: int, committed: Sequence[int], root: str, other: OtherNaming) -> None:
    """Raise CheckpointNotFoundError unless a step is committed; with the steps that are, under either naming."""
    if step in committed:
        return
    others = f"there are {steps_text(list(committed))}" if committed else "there is none at all"
    if other is not None and step in other[1]:
        others += f"; with checkpoint.naming={other[0]} it is there"
    raise CheckpointNotFoundError(f"checkpoint.resume={step}, but {root} has no such checkpoint; {others}.")


def refuse_others(run: RunContext, scan: Scan, other: OtherNaming) -> None:
    """Refuse to start from scratch, without a checkpoint of one's own, beside checkpoints that may be meant.

    What has no step in its name, such as a pretrained model, is warned about and left alone.

    Args:
        run: that begins.
        scan: of its folder.
        other: what is there under the other naming.

    Raises:
        CheckpointNotFoundError: with what to type.
    """
    fs, root, names = run.fs, run.root, run.names
    if other is not None:
        word, steps = other
        raise CheckpointNotFoundError(
            f"{root} holds no checkpoint named as {names.folder(steps[-1])}, and those of the other naming, the newest "
            f"{NAMINGS[word].folder(steps[-1])}. To go on from it, type checkpoint.naming={word}; {_FROM_SCRATCH} or "
            "checkpoint.resume=never."
        )
    foreign = foreign_checkpoints(fs, root, scan, names)
    numbered = {path: step for path in foreign if (step := step_in_name(os.path.basename(path))) is not None}
    if root in foreign or numbered:
        path = root if root in foreign else max(numbered, key=lambda each: numbered[each])
        text = f"{root} has no checkpoint of this run, and one of another program or name, {path}. "
        if path == root:
            text = f"checkpoint.dir={root} is a checkpoint itself. "
        if _is_readable(fs, path):
            elsewhere = " with another checkpoint.dir" if path == root else ""
            text += f"To load it, type {typed('checkpoint.resume', path)}{elsewhere}; "
        else:
            text += "Its format is not read here; "
        # Under a name of ours, or around all of them, it would be in the way.
        free = path != root and names.step(os.path.basename(path)) is None
        raise CheckpointNotFoundError(f"{text}{_FROM_SCRATCH}{' or checkpoint.resume=never' if free else ''}.")
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        hint = typed("checkpoint.resume", foreign[0])
        logger.warning("%s%s may be a checkpoint, and is not loaded; to load it, type %s", foreign[0], more, hint)
    pointed = read_pointer(fs, root, names)
    if pointed is not None and not scan.occupied:
        logger.warning("%s in %s names step %d, and there is no such checkpoint", names.pointer, root, pointed)


def _is_readable(fs: FsOps, path: str) -> bool:
    """Whether a checkpoint of another program is one that a reader takes; of Megatron before DCP there is none."""
    if not os.path.isdir(path):
        return True
    files = fs.names(path)
    return MANIFEST in files or ".metadata" in files or sum(name.endswith(SINGLE_FILES) for name in files) == 1


def step_of_checkpoint(fs: FsOps, path: str) -> int:
    """The step of a checkpoint anywhere, by its name; 0, with a warning, where the name has none.

    Raises:
        CheckpointNotFoundError: there is nothing, or a folder of checkpoints.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"checkpoint.resume={path}, and there is nothing; name the folder of a checkpoint, or its file."
        )
    names = [os.path.basename(path)]
    if not os.path.isdir(path):
        names.insert(0, os.path.basename(os.path.dirname(path)))
    for naming in NAMINGS.values() if os.path.isdir(path) else ():
        steps = scan_steps(fs, path, naming).committed
        if steps:
            newest = os.path.join(path, naming.folder(steps[-1]))
            raise CheckpointNotFoundError(
                f"checkpoint.resume={path} is a folder of checkpoints; name one of them, such as "
                f"{typed('checkpoint.resume', newest)}"
            )
    step = next((step for step in map(step_in_name, names) if step is not None), None)
    if step is None:
        logger.warning("%s has no step in its name, such as iter_0000200: it counts as step 0", path)
    return step or 0


def size_of_checkpoint(fs: FsOps, path: str) -> tuple[int, bool]:
    """The bytes of a checkpoint of any program, and whether it has checksums.

    Raises:
        CheckpointCorruptError: its manifest is damaged, or cannot be read.
    """
    try:
        if not os.path.isdir(path):
            return os.path.getsize(path), False
        manifest = read_manifest(fs, path)
        if manifest is not None:
            return sum(entry["size"] for entry in manifest["files"]), True
        return sum(fs.size(os.path.join(path, name)) or 0 for name in fs.names(path)), False
    except OSError as error:
        raise read_failure(path, error) from error
