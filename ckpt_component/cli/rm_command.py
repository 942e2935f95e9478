"""`ckpt rm CKPT...`: delete checkpoints, each at once, and never the last good one by accident.

Delete checkpoints, or quarantined ones by their path. All are checked before the first is deleted, and nothing is
asked. Refused are the last good checkpoint of a root, and those of a run that is alive.

example:
  ckpt rm checkpoints@200 checkpoints@300

A run on another host or in another container counts as alive, unless
--ended.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from ..core.commit.cleanup import discard
from ..core.commit.names import MANIFEST, QUARANTINE_PREFIX, StepNames
from ..core.commit.scan import scan_steps
from ..core.storage.locate import absolute
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointNotFoundError, CheckpointSaveError
from ..formats.checkpoints import find_checkpoint
from .output import Output
from .roots import Location, add_safeguards, place_of, point_elsewhere, shown, typed_errors
from .text import counted
from .usage import freed_text, usage_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="ROOT/iter_0000200 or ROOT@200")
    parser.add_argument("--force", action="store_true", help="delete the last good one of a root, or a part, too")
    add_safeguards(parser, "delete")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Delete.

    Raises:
        CheckpointError: a checkpoint is not there, must not be deleted, or could not be
    """
    places = {place.path: place for place in (_place(each, parsed.options) for each in parsed.checkpoints)}
    fs = {place.root: place.fs for place in places.values()}
    steps_by_root: dict[tuple[str, StepNames], list[int]] = {}
    for place in places.values():
        place.refuse_running(f"{place.path} is not deleted", ended=parsed.ended)
        if place.names is not None:
            steps_by_root.setdefault((place.root, place.names), []).append(place.step)
    for (root, names), steps in steps_by_root.items():
        scan = scan_steps(fs[root], root, names)
        good, parts = scan.committed, sorted(scan.parts.keys() & {*steps})
        if parts and not parsed.force:
            raise CheckpointConfigError(
                f"{scan.parts[parts[0]]} Without what is here the other hosts cannot use theirs, so it is not deleted; "
                "a run that goes on deletes it on all hosts. To delete it here all the same, type --force."
            )
        if good and not parsed.force and set(good) <= set(steps):
            raise CheckpointConfigError(
                f"{os.path.join(root, names.folder(good[-1]))} is not deleted, because {root} would have no good "
                "checkpoint left. To delete it all the same, type --force."
            )
    files = {path: [*place.fs.files_below(path)] for path, place in places.items()}
    usage = usage_of(file for found in files.values() for file in found)
    if not parsed.dry_run:
        # First the pointers: if this is cut off, none names a checkpoint that is gone.
        for (root, names), steps in steps_by_root.items():
            with typed_errors(f"the pointer file of {root} could not be changed, and nothing was deleted there"):
                point_elsewhere(fs[root], root, names, steps)
        failed = [path for path, place in places.items() if not discard(place.fs, path)]
        if failed:
            rest = f", and {counted(len(places) - len(failed), 'checkpoint')} deleted" if len(places) > 1 else ""
            raise CheckpointSaveError(f"{', '.join(failed)} could not be deleted{rest}; ckpt -v rm says why.")
    word = "would delete" if parsed.dry_run else "deleted"
    sizes = {path: usage_of(found).size for path, found in files.items()}
    deleted = [{"path": path, "bytes": size} for path, size in sizes.items()]
    lines = [f"{word} {shown(path)}: {amount(size)}" for path, size in sizes.items()]
    data = {"deleted": deleted, "freed_bytes": usage.freed, "dry_run": parsed.dry_run}
    output.result(data, [*lines, *freed_text(usage, parsed.dry_run)])


def _place(argument: str, options: Mapping[str, str]) -> Location:
    """The place of a checkpoint of ours, good or damaged, or of a quarantined one."""
    path = absolute(argument)
    if os.path.basename(path).startswith(QUARANTINE_PREFIX):
        place = place_of(path, options)
        if place.fs.is_folder(path):
            return place
    checkpoint = find_checkpoint(argument, options)
    if checkpoint.whole_root:
        raise CheckpointConfigError(
            f"{path} is a folder of checkpoints; name those to delete: {argument}@{checkpoint.step}."
        )
    place = place_of(checkpoint.path, options)
    ours = place.fs.exists(os.path.join(place.path, MANIFEST)) or (
        place.names is not None and place.step in scan_steps(place.fs, place.root, place.names).torn
    )
    if not place.fs.is_real_folder(place.path) or not ours:
        raise CheckpointNotFoundError(
            f"{place.path} has no {MANIFEST}, so it is not deleted here; delete another program's files with rm -r."
        )
    return place
