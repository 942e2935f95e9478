"""Find the checkpoint that a run begins with: by step, by path, or the newest; and others that may be meant."""

from __future__ import annotations

import logging
import os

from ..core.commit.names import MANIFEST, NAMINGS, no_step, step_in_name
from ..core.commit.scan import (
    Scan,
    committed_under_other_names,
    foreign_checkpoints,
    pointed_folder,
    read_pointer,
    scan_steps,
)
from ..core.spelling import typed
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointUnreadableError
from ..formats.folder import is_readable
from .policies import ResumePolicy
from .run_context import RunContext, steps_text

logger = logging.getLogger(__name__)

_FROM_SCRATCH = "to start from scratch, a new checkpoint.dir"


def candidates_of(run: RunContext, policy: ResumePolicy, scan: Scan) -> list[tuple[int, str]]:
    """Return the checkpoints to try, best first, as (step, path); none: the run starts from scratch.

    Raises:
        CheckpointNotFoundError: there is no checkpoint as `resume` asks for, or only one that may be meant
        CheckpointCorruptError: the checkpoint that it asks for, or every one, is damaged
    """
    root, choice = run.root, policy.choice
    if policy.path is not None:
        path = run.own_spelling(policy.path)
        return [_step_and_path(run.storage_of(path), path)]
    if choice == "never":
        return []
    other = committed_under_other_names(run.fs, root, run.names)
    if choice == "best":
        choice = _best_step(run, scan)
    if isinstance(choice, int):
        unknown = {**scan.unusable, **scan.parts}
        bad = {**scan.damaged, **scan.torn, **unknown}
        if choice in bad:
            kind = CheckpointUnreadableError if choice in unknown else CheckpointCorruptError
            raise kind(f"checkpoint.resume={policy.choice}, and that checkpoint cannot be used: {bad[choice]}")
        if choice not in scan.committed:
            steps = "step" if len(scan.committed) == 1 else "steps"
            others = f"it has {steps} {steps_text(scan.committed)}" if scan.committed else "there is none at all"
            if other is not None and choice in other[1]:
                others += f"; with checkpoint.naming={other[0]} it is there"
            raise CheckpointNotFoundError(f"checkpoint.resume={choice}, but {root} has no such checkpoint; {others}.")
        return [(choice, run.path_of(choice))]
    if scan.committed:
        if other is not None:
            logger.warning(
                "%s also holds checkpoints up to step %d of checkpoint.naming=%s, which are ignored",
                root,
                other[1][-1],
                other[0],
            )
        return [(step, run.path_of(step)) for step in reversed(scan.committed)]
    # A folder with a manifest was a checkpoint once, so the user hardly means to start from scratch next to it.
    unknown = {**scan.unusable, **scan.parts}
    lost = {**scan.damaged, **unknown}
    if lost:
        newest = max(lost)
        kind = CheckpointUnreadableError if newest in unknown else CheckpointCorruptError
        raise kind(
            f"{root} holds checkpoints, but none that can be used; the newest: {lost[newest]} To start from scratch, "
            "use checkpoint.resume=never with another checkpoint.dir, or with checkpoint.rewind=true."
        )
    _refuse_others(run, scan, other)
    if choice == "must":
        raise CheckpointNotFoundError(
            f"checkpoint.resume=must, but {root} has no committed checkpoint; use resume=auto to start from scratch."
        )
    return []


def _best_step(run: RunContext, scan: Scan) -> int:
    """The step of the best checkpoint; one that is damaged counts too, so that no worse one takes its place unnoticed.

    Raises:
        CheckpointNotFoundError: no checkpoint has the metric
    """
    if run.best is None:
        raise CheckpointNotFoundError(
            "checkpoint.resume=best needs a metric to compare; type checkpoint.keep.best.metric=val_loss, for example."
        )
    ranked = run.best.ranked(scan.metrics)
    if ranked:
        return ranked[0]
    names = dict.fromkeys(name for metrics in scan.metrics.values() for name in metrics)
    there = f"no checkpoint in {run.root} has the metric '{run.best.metric}'{run.best.others(names)}"
    if not scan.committed:
        there = f"{run.root} has no committed checkpoint"
    raise CheckpointNotFoundError(
        f"checkpoint.resume=best, but {there}. To continue from the newest, or from scratch, type "
        "checkpoint.resume=auto."
    )


def _refuse_others(run: RunContext, scan: Scan, other: tuple[str, list[int]] | None) -> None:
    """Refuse to start from scratch if the folder has no checkpoint of this run, but others that may be meant.

    A checkpoint without a step in its name, such as a pretrained model, only causes a warning.

    Args:
        run: the run
        scan: scan of its folder
        other: the other naming and its steps in the folder, if there are any

    Raises:
        CheckpointNotFoundError: there are such checkpoints; the text says what to type
    """
    fs, root, names = run.fs, run.root, run.names
    if other is not None:
        word, steps = other
        raise CheckpointNotFoundError(
            f"{root} holds no checkpoint named as {names.folder(steps[-1])}, and those of the other naming, the newest "
            f"{NAMINGS[word].folder(steps[-1])}. To continue from it, type checkpoint.naming={word}; {_FROM_SCRATCH} "
            "or checkpoint.resume=never."
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
        # With a name of this run's checkpoints, or as their folder, it would be in the way.
        free = path != root and names.step(os.path.basename(path)) is None
        raise CheckpointNotFoundError(f"{text}{_FROM_SCRATCH}{' or checkpoint.resume=never' if free else ''}.")
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        hint = typed("checkpoint.resume", foreign[0])
        logger.warning("%s%s may be a checkpoint, but is not loaded; to load it, type %s", foreign[0], more, hint)
    pointed = read_pointer(fs, root, names)
    if pointed is not None and not scan.occupied:
        logger.warning("%s in %s names step %d, but there is no such checkpoint", names.pointer, root, pointed)


def _is_readable(fs: Storage, path: str) -> bool:
    """Whether a reader supports a checkpoint of another program; Megatron's format before DCP is not supported."""
    if not fs.is_folder(path):
        return True
    files = fs.names(path)
    return MANIFEST in files or is_readable(files)


def _step_and_path(fs: Storage, path: str) -> tuple[int, str]:
    """Return the step and the path of a checkpoint anywhere: of the newest in Megatron's folder of checkpoints.

    The step is the one in its name; 0, with a warning, if it has none.

    Raises:
        CheckpointNotFoundError: the path does not exist, or is a folder of our checkpoints
    """
    if not fs.exists(path):
        raise CheckpointNotFoundError(
            f"checkpoint.resume={path} does not exist{no_step(path)}; name the folder of a checkpoint, or its file."
        )
    is_folder = fs.is_folder(path)
    for naming in NAMINGS.values() if is_folder else ():
        steps = scan_steps(fs, path, naming).committed
        if steps:
            newest = os.path.join(path, naming.folder(steps[-1]))
            raise CheckpointNotFoundError(
                f"checkpoint.resume={path} is a folder of checkpoints; name one of them, such as "
                f"{typed('checkpoint.resume', newest)}"
            )
    if not _is_readable(fs, path):
        path = pointed_folder(fs, path) or path
    names = [os.path.basename(path)]
    if not is_folder:
        names.insert(0, os.path.basename(os.path.dirname(path)))
    step = next((step for step in map(step_in_name, names) if step is not None), None)
    if step is None:
        logger.warning("%s has no step in its name, such as iter_0000200; it is loaded as step 0", path)
    return step or 0, path
