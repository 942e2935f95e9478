"""`ckpt cp`, `mv`, `rm` and `gc`: change what is in folders of checkpoints, never half, never the last good one."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.commit.cleanup import RetentionPolicy, Unfinished, discard, sweep_attempts
from ..core.commit.copying import copy_checkpoint, same_content
from ..core.commit.fencing import FencingToken
from ..core.commit.manifest import read_manifest
from ..core.commit.names import ALIVE_PREFIX, MANIFEST, QUARANTINE_PREFIX, StepNames
from ..core.commit.scan import scan_steps
from ..core.progress import Progress, progress_bar
from ..core.storage.files import local_files
from ..core.storage.locate import absolute, below
from ..core.storage.space import amount
from ..errors import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from ..formats.checkpoints import Root, find_checkpoint, find_root
from ..formats.verification import verify_checkpoint, verify_files
from .output import Output, Table, counted
from .roots import (
    Location,
    add_safeguards,
    destination,
    freed_text,
    is_one_checkpoint,
    place_of,
    point_elsewhere,
    shown,
    tree_bytes,
    typed_errors,
    usage_of,
)

#: Formats whose files do not say which step they are of.
_RENUMBERED = ("dcp", "torch_save", "safetensors")


@dataclass(frozen=True)
class Transfer:
    """One copy or move.

    Attributes:
        source: the checkpoint
        manifest: its manifest
        target: where it goes
        ended: the user says that runs on other hosts have ended
        progress: follows the bytes
    """

    source: Location
    manifest: Mapping[str, Any]
    target: Location
    ended: bool
    progress: Progress

    def refuse(self, *, moves: bool) -> None:
        """Raise an error if the transfer must not be made.

        Raises:
            CheckpointConfigError: the places do not fit, or the format does not allow another step
            CheckpointExistsError: the target is there, and is not a copy of the source
            CheckpointFencedError: a run that may be alive uses one of the roots
        """
        source, target = self.source.path, self.target.path
        if below(target, source) is not None:
            raise CheckpointConfigError(f"{target} is the checkpoint itself, or inside of it; name another place.")
        if is_one_checkpoint(self.target.fs, self.target.root):
            raise CheckpointConfigError(
                f"{self.target.root} is a checkpoint itself, and none is put inside of another; name another place."
            )
        other_step = -1 not in (self.source.step, self.target.step) and self.source.step != self.target.step
        if other_step and self.manifest.get("format") not in _RENUMBERED:
            raise CheckpointConfigError(
                f"{source} has the format {self.manifest.get('format')!r:.50}, whose files may hold their step; it "
                f"cannot become step {self.target.step}. Keep the step, or give it a name without one."
            )
        if moves:
            self._refuse_running(self.source)
        self._refuse_running(self.target)
        if self.target.fs.exists(target) and not self.is_there:
            raise CheckpointExistsError(
                f"{target} exists and is no copy of {source}; remove it first, or name another."
            )

    @cached_property
    def is_there(self) -> bool:
        """Whether the target is a copy of the source, left by a command that was cut off."""
        fs, path = self.target.fs, self.target.path
        manifest = read_manifest(fs, path) if fs.is_real_folder(path) else None
        return manifest is not None and same_content(self.manifest, manifest)

    def copy(self) -> None:
        """Copy, or verify a copy that is there; then set the pointer."""
        source, target = self.source, self.target
        if self.is_there:
            verify_checkpoint(target.fs, target.path, self.progress)
        else:
            sweep_attempts(target.fs, target.path)  # what a copy left that was cut off
            copy_checkpoint(
                source.fs, source.path, self.manifest, target.fs, target.path, self._before_commit, self.progress
            )
        target.point_to()

    def move(self) -> bool:
        """Rename, or copy to another file system and delete; returns whether it was renamed."""
        if not self.is_there and self._rename():
            return True
        self.copy()
        self._leave()
        if not discard(self.source.fs, self.source.path):
            raise CheckpointSaveError(f"{self.target.path} is complete, and {self.source.path} could not be deleted.")
        return False

    def _rename(self) -> bool:
        """Rename; False where that is not possible: to another file system, or without renames."""
        source, target, fs = self.source, self.target, local_files(self.target.fs)
        if fs is None or not (fs.atomic_rename and source.fs.atomic_rename):
            return False
        fs.make_folders(target.root)
        self._leave()
        try:
            fs.rename_new(source.path, target.path)
        except OSError as error:
            source.point_to()
            if error.errno == errno.EXDEV:
                return False
            raise
        fs.sync_folder(target.root)
        fs.sync_folder(source.root)
        target.point_to()
        return True

    def _leave(self) -> None:
        """Have the source's pointer name another one."""
        if self.source.names is not None:
            self._refuse_running(self.source)
            point_elsewhere(self.source.fs, self.source.root, self.source.names, [self.source.step])

    def _before_commit(self, staging: str, kept: Collection[str]) -> None:
        try:
            verify_files(self.target.fs, staging, self.manifest, self.progress)
        except CheckpointCorruptError as error:
            raise CheckpointCorruptError(
                f"{self.source.path}, or its copy, is damaged, so {self.target.path} was not made: {error}"
            ) from error
        self._refuse_running(self.target)

    def _refuse_running(self, place: Location) -> None:
        what = f"{place.path} is not {'moved' if place is self.source else 'made'}"
        place.refuse_running(what, ended=self.ended)


def cp_arguments(parser: argparse.ArgumentParser, verb: str = "copy") -> None:
    """Add the arguments of the command; `mv` has the same."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint: ROOT/iter_0000200, ROOT@200, ROOT@newest")
    parser.add_argument(
        "target",
        metavar="DST",
        help="a new path, an existing folder or FOLDER/ to put it into, or ROOT@300: as step 300",
    )
    parser.add_argument("--commit", choices=["rename", "manifest"], help="how the copy appears (as others in its root)")
    add_safeguards(parser, verb)


def run_cp(parsed: argparse.Namespace, output: Output, *, moves: bool = False) -> None:
    """`ckpt cp SRC DST`: copy a checkpoint, verified, so that the copy is whole or not there.

    Copy a checkpoint. The copy is verified, durable, and appears whole or not at all. Repeated after it was cut off,
    the command finishes.

    example:
      ckpt cp checkpoints@200 backup/
      ckpt cp checkpoints@best other@300

    ROOT@300 as DST: only for formats whose files do not hold the step. A
    step inside the training state stays as it is.
    --commit manifest is for a mounted object store.
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


def mv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    cp_arguments(parser, verb="move")


def run_mv(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt mv SRC DST`: move a checkpoint, by a rename where that is possible.

    Move a checkpoint: one rename, or, to another file system, a verified copy, and then the source is deleted. Repeated
    after it was cut off, the command finishes. Checkpoints of a run that is alive are not moved.

    example:
      ckpt mv checkpoints@200 /archive/
    """
    run_cp(parsed, output, moves=True)


def rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="ROOT/iter_0000200 or ROOT@200")
    parser.add_argument("--force", action="store_true", help="delete the last good one of a root, or a part, too")
    add_safeguards(parser, "delete")


def run_rm(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt rm CKPT...`: delete checkpoints, each at once, and never the last good one by accident.

    Delete checkpoints, or quarantined ones by their path. All are checked before the first is deleted, and nothing is
    asked. Refused are the last good checkpoint of a root, and those of a run that is alive.

    example:
      ckpt rm checkpoints@200 checkpoints@300

    A run on another host or in another container counts as alive, unless
    --ended.
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


#: Whether debris is in use -> why it is not deleted.
_WHY_KEPT = {True: "a process works on it, or did within the last minute", False: "left on another host: --ended"}


def gc_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="the folder of checkpoints")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest good checkpoints, at least 1")
    add_safeguards(parser, "delete")


def run_gc(parsed: argparse.Namespace, output: Output) -> int | None:
    """`ckpt gc ROOT`: delete what dead runs left, and checkpoints that need not be kept.

    Delete what dead runs left in a folder of checkpoints: unfinished and half-deleted ones. What a live process works
    on stays, and so does the debris of other hosts, unless --ended. With --keep-last, also delete older checkpoints,
    except those that the run keeps permanently (checkpoint.keep.every_steps and keep.best).

    example:
      ckpt gc checkpoints --keep-last 3 --dry-run

    Quarantined checkpoints stay; delete them with ckpt rm.
    """
    if parsed.keep_last is not None and parsed.keep_last < 1:
        raise CheckpointConfigError(f"--keep-last={parsed.keep_last} would keep none; type 1 or more.")
    root = find_root(parsed.root, parsed.options)
    place = place_of(os.path.join(root.path, root.names.folder(0)), parsed.options)
    fs, names = place.fs, root.names
    old = [] if parsed.keep_last is None else _old(root, parsed.keep_last)
    fenced: set[str] = set()
    if old or parsed.ended:
        place.refuse_running("nothing is deleted", ended=parsed.ended)
    failed: list[str] = []
    with typed_errors(f"{root.path} could not be cleaned"):
        unfinished = Unfinished(fs, root.path, names)
        if parsed.ended:
            fenced = unfinished.left_by_owners()
        paths = [os.path.join(root.path, name) for name in unfinished.debris(fenced)]
        files = {path: [*fs.files_below(path)] for path in [*paths, *(root.paths[step] for step in old)]}
        if not parsed.dry_run:
            if parsed.ended:
                FencingToken(fs, root.path, names).acquire()  # so that a run that is alive after all commits nothing
            unfinished.sweep(fenced)
            point_elsewhere(fs, root.path, names, old)
            for step in old:
                discard(fs, root.paths[step])
            failed = [path for path in files if fs.exists(path)]
        used = {os.path.join(root.path, name): used for name, used in Unfinished(fs, root.path, names).in_use().items()}
    gone = {path: found for path, found in files.items() if path not in failed}
    usage = usage_of(file for found in gone.values() for file in found)
    data = {
        "root": root.path,
        "deleted": [{"path": path, "bytes": usage_of(found).size} for path, found in gone.items()],
        "bytes": usage.size,
        "freed_bytes": usage.freed,
        "failed": failed,
        "kept": [
            {"path": path, "in_use": in_use}
            for path, in_use in used.items()
            if path not in files and not os.path.basename(path).startswith(ALIVE_PREFIX)
        ],
        "dry_run": parsed.dry_run,
    }
    output.result(data, [*_lines(data, output), *freed_text(usage, parsed.dry_run)])
    return 1 if failed else None


def _old(root: Root, last: int) -> list[int]:
    """The committed steps that need not be kept; those stay that the newest one's config keeps for good."""
    committed, best = root.scan.committed, list[int]()
    if root.best_policy is not None:
        ranked = root.best_policy.ranked({step: root.scan.metrics[step] for step in committed})
        best = ranked[: root.best_policy.last]
    return RetentionPolicy(last, root.keep.get("every_steps")).to_delete(committed, best)


def _lines(data: dict[str, Any], output: Output) -> Iterator[str]:
    word = "would be deleted" if data["dry_run"] else "deleted"
    if data["deleted"]:
        rows = [(os.path.relpath(each["path"], data["root"]), amount(each["bytes"])) for each in data["deleted"]]
        yield from output.table(Table([(word, "size"), *rows]))
        yield f"{word}: {amount(data['bytes'])} in {data['root']}"
    else:
        yield f"nothing to delete in {data['root']}"
    for each in data["kept"]:
        yield f"kept {os.path.relpath(each['path'], data['root'])}: {_WHY_KEPT[each['in_use']]}"
    yield from (f"could not be deleted: {path}" for path in data["failed"])
