"""`ckpt gc ROOT`: delete what dead runs left, and checkpoints that need not be kept.

Delete what dead runs left in a folder of checkpoints: unfinished and half-deleted ones. What a live process works on
stays, and so does the debris of other hosts, unless --ended. With --keep-last, also delete older checkpoints, except
those that the run keeps permanently (checkpoint.keep.every_steps and keep.best).

example:
  ckpt gc checkpoints --keep-last 3 --dry-run

Quarantined checkpoints stay; delete them with ckpt rm.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from ..core.commit.cleanup import RetentionPolicy, Unfinished, discard
from ..core.commit.fencing import FencingToken
from ..core.commit.names import ALIVE_PREFIX
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..formats.checkpoints import Root, find_root
from .output import Output
from .roots import add_safeguards, place_of, point_elsewhere, typed_errors
from .text import Table
from .usage import freed_text, usage_of

#: Whether debris is in use -> why it is not deleted.
_WHY_KEPT = {True: "a process works on it, or did within the last minute", False: "left on another host: --ended"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="the folder of checkpoints")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest good checkpoints, at least 1")
    add_safeguards(parser, "delete")


def run(parsed: argparse.Namespace, output: Output) -> int | None:
    """Delete debris and old checkpoints.

    Raises:
        CheckpointError: the arguments are wrong, a run is alive, or something could not be deleted
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
