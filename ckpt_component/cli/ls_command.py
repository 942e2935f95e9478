"""`ckpt ls ROOT`: list a folder of checkpoints, and what else is there.

List the checkpoints of a folder, oldest first: committed; unverified (of another program, without checksums); damaged;
a part, of which other hosts have the rest; in progress; debris that killed runs left, which ckpt gc deletes; and
snapshots that this host has in memory. Of published weights (checkpoint.publish.to) list the versions.

example:
  ckpt ls checkpoints
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict

from ..core.storage.locate import absolute, is_url, storage_at
from ..core.storage.space import amount
from ..formats.checkpoints import Root, find_root
from ..hosts.wire import roots_here
from .listing import (
    COMMITTED,
    DAMAGED,
    DEBRIS,
    IN_MEMORY,
    IN_PROGRESS,
    PART,
    STYLES,
    UNVERIFIED,
    Listed,
    advice,
    entries_of,
    order_of,
    what_text,
)
from .output import Output
from .text import Table, age_text, counted
from .usage import files_in
from .version_list import has_versions, list_versions

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="folder of checkpoints")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """List a folder.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is a checkpoint itself
    """
    path, storage = absolute(parsed.root), storage_at(parsed.root, options=parsed.options)
    if has_versions(storage, path):
        list_versions(storage, path, output)
        return
    root = find_root(parsed.root, parsed.options)
    entries = sorted([*entries_of(root), *_in_memory(root)], key=order_of)
    data = {
        "root": root.path,
        "newest": root.newest,
        "best": root.best,
        "metric": None if root.best_policy is None else root.best_policy.metric,
        "entries": [
            {**asdict(entry), "path": None if entry.state == IN_MEMORY else os.path.join(root.path, entry.name)}
            for entry in entries
        ],
    }
    output.result(data, _lines(root, entries, output))
    if not entries and not is_url(parsed.root):
        output.show(advice(root, parsed.root, "ls"))


def _lines(root: Root, entries: list[Listed], output: Output) -> Iterator[str]:
    if not entries:
        yield f"no checkpoints in {root.path}"
        return
    newest, best = root.newest, root.best
    rows = [("step", "age", "size", "ranks", "what"), *(_row(root, entry, newest, best) for entry in entries)]
    good = (COMMITTED, best)
    styles = [STYLES.get(entry.state, "green" if (entry.state, entry.step) == good else "") for entry in entries]
    yield from output.table(Table(rows, left=(4,)), styles)
    yield ""
    yield _summary(entries) + ("; files are shared, see ckpt du" if _is_sharing(root, newest) else "")


def _in_memory(root: Root) -> list[Listed]:
    """The snapshots of the folder that servers of this host have."""
    try:
        if not roots_here():
            return []
        from .memory_runs import runs_in_memory  # which most folders need not wait for

        return [
            Listed(os.path.basename(run.snapshots.paths[step]), IN_MEMORY, step, *run.facts_of(step))
            for run in runs_in_memory(root.path)
            for step in run.steps
        ]
    except OSError as error:  # what is on disk can be listed all the same
        logger.warning("snapshots in memory are not listed: %s", error)
        return []


def _is_sharing(root: Root, newest: int | None) -> bool:
    """Whether the newest checkpoint shares files; a look at all of them would take too long."""
    if newest is None or is_url(root.path):
        return False
    return any(file.paths > 1 for file in files_in(root.fs, root.paths[newest]))


def _row(root: Root, entry: Listed, newest: int | None, best: int | None) -> tuple[str, ...]:
    more = ""
    if entry.state == COMMITTED:
        if entry.step == newest:
            more += ", newest"
        if entry.step == best and root.best_policy is not None and entry.metrics:
            more += f", best ({root.best_policy.metric} {entry.metrics[root.best_policy.metric]:g})"
    step = "" if entry.step is None else str(entry.step)
    ranks = "" if entry.ranks is None else str(entry.ranks)
    return step, age_text(time.time() - entry.time), amount(entry.nbytes), ranks, what_text(root, entry, more)


def _summary(entries: list[Listed]) -> str:
    """`3 checkpoints, 4.50 GB; 1 damaged; 2 debris, 1.20 GB`."""
    good = [entry for entry in entries if entry.state in (COMMITTED, UNVERIFIED)]
    parts = [f"{counted(len(good), 'checkpoint')}, {amount(sum(each.nbytes for each in good))}"]
    for state in (DAMAGED, PART, IN_PROGRESS, IN_MEMORY, DEBRIS):
        group = [entry for entry in entries if entry.state == state]
        if group:
            size = f", {amount(sum(each.nbytes for each in group))}" if state == DEBRIS else ""
            parts.append(f"{len(group)} {state}{size}")
    return "; ".join(parts)
