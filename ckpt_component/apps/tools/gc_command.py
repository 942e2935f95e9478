"""`ckpt gc ROOT`: delete what dead runs left, and checkpoints that need not be kept."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from ...errors import CheckpointConfigError, CheckpointNotFoundError
from ...managing.policies import RetentionPolicy
from ...storage.cleanup import debris, discard, leftovers, sweep
from ...storage.fencing import FencingToken
from ...storage.names import QUARANTINE_PREFIX
from ...storage.run_record import stored_config
from ...storage.space import amount
from .checkpoints import Root, find_root
from .output import Output, table
from .roots import Place, file_system_of, point_elsewhere, refuse_running, tree_bytes, typed_errors

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Delete what dead runs left in a folder of checkpoints: unfinished and half-deleted ones. What a live process "
        "works on stays, and so does the debris of other hosts, unless --ended. With --keep-last, also delete older "
        "checkpoints, but those that the run keeps for good (checkpoint.keep.every_steps and keep.best)."
    )
    parser.epilog = "example:\n  ckpt gc checkpoints --keep-last 3 --dry-run"
    parser.add_argument("root", metavar="ROOT", help="the folder of checkpoints")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest good checkpoints, at least 1")
    parser.add_argument("--ended", action="store_true", help="the run that owns the root, on another host, has ended")
    parser.add_argument("--dry-run", action="store_true", help="print what would happen and delete nothing")


def run(parsed: argparse.Namespace, output: Output) -> int | None:
    """Delete debris and old checkpoints.

    Raises:
        CheckpointError: the arguments are wrong, a run is alive, or something could not be deleted.
    """
    if parsed.keep_last is not None and parsed.keep_last < 1:
        raise CheckpointConfigError(f"--keep-last={parsed.keep_last} would keep none; type 1 or more.")
    root = find_root(parsed.root)
    fs, names = file_system_of(root.path), root.names
    place = Place(os.path.join(root.path, names.folder(0)), names, 0)
    old = [] if parsed.keep_last is None else _old(root, parsed.keep_last)
    if old:
        refuse_running(fs, place, "no checkpoint is deleted", ended=parsed.ended)
    fenced = _fenced(place, ended=parsed.ended)
    with typed_errors(f"{root.path} could not be cleaned"):
        dead = debris(fs, root.path, names, fenced)
        sizes = {os.path.join(root.path, name): tree_bytes(fs, os.path.join(root.path, name)) for name in dead}
        sizes |= {root.paths[step]: tree_bytes(fs, root.paths[step]) for step in old}
        failed: list[str] = []
        if not parsed.dry_run:
            if parsed.ended:
                FencingToken(fs, root.path, names).acquire()  # so that a run that is alive after all commits nothing
            sweep(fs, root.path, names, fenced)
            point_elsewhere(fs, root.path, names, old)
            for step in old:
                discard(fs, root.paths[step])
            failed = list(filter(os.path.lexists, sizes))
    gone = {path: size for path, size in sizes.items() if path not in failed}
    _print(output, root, gone, failed, dry_run=parsed.dry_run)
    return 1 if failed else None


def _old(root: Root, last: int) -> list[int]:
    """The committed steps that need not be kept; those stay that the newest one's config keeps for good."""
    committed = root.scan.committed
    keep: dict[str, Any] = {}
    if committed:
        try:
            keep = stored_config(root.paths[committed[-1]]).resolved.get("checkpoint", {}).get("keep", {})
        except CheckpointNotFoundError:
            logger.info("%s has no config that says what to keep for good", root.path)
    metrics = {step: root.scan.metrics[step] for step in committed}
    kept, every = keep.get("best", {}).get("last", 1), keep.get("every_steps")
    best = root.best_policy.ranked(metrics)[: kept if isinstance(kept, int) else None] if root.best_policy else []
    return RetentionPolicy(last, every if isinstance(every, int) else None).to_delete(committed, best)


def _fenced(place: Place, *, ended: bool) -> set[str]:
    """What runs of other hosts left, if the user says that they have ended."""
    if not ended:
        return set()
    fs = file_system_of(place.root)
    refuse_running(fs, place, "nothing is deleted", ended=True)
    return leftovers(fs, place.root, place.names) if place.names is not None else set()


def _print(output: Output, root: Root, gone: dict[str, int], failed: list[str], *, dry_run: bool) -> None:
    """Print what was deleted, what could not be, and what stays although no run uses it."""
    fs = file_system_of(root.path)
    kept = {
        name: tree_bytes(fs, os.path.join(root.path, name))
        for name in fs.names(root.path)
        if name.startswith(QUARANTINE_PREFIX)
    }
    total = sum(gone.values())
    data: dict[str, Any] = {
        "root": root.path,
        "deleted": [{"path": path, "bytes": size} for path, size in gone.items()],
        "bytes": total,
        "failed": failed,
        "quarantined": [{"path": os.path.join(root.path, name), "bytes": size} for name, size in kept.items()],
        "dry_run": dry_run,
    }
    word = "would delete" if dry_run else "deleted"

    def lines() -> list[str]:
        rows = [(os.path.relpath(path, root.path), amount(size)) for path, size in gone.items()]
        text = list(table(("deleted" if not dry_run else "would be deleted", "size"), rows, right=(1,))) if rows else []
        text.append(f"{word} {amount(total)} in {root.path}" if gone else f"nothing to delete in {root.path}")
        text += [f"could not be deleted: {path}" for path in failed]
        if kept:
            text.append(
                f"kept: {len(kept)} quarantined, {amount(sum(kept.values()))}; ckpt rm {root.path}/"
                f"{QUARANTINE_PREFIX}... deletes them"
            )
        return text

    output.result(data, lines)
