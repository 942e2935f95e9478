"""What is in a folder of checkpoints: those of all kinds, and what else saves and deletions left there."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.commit.cleanup import Unfinished
from ..core.commit.names import ALIVE_PREFIX, STAGING_PREFIX, saved_as, step_in_name
from ..formats.checkpoints import Root, created_of, is_checkpoint
from .roots import tree_bytes

COMMITTED, UNVERIFIED, DAMAGED, IN_PROGRESS, DEBRIS = "committed", "unverified", "damaged", "in progress", "debris"
#: Of a checkpoint of which each host has its own files.
PART = "part"
#: A snapshot that servers of this host have, which the next start on it may resume from.
IN_MEMORY = "in memory"
#: What only has the name of a checkpoint.
UNKNOWN = "unknown"
#: State -> the style of its row in a table; others have none.
STYLES = {DAMAGED: "red", IN_PROGRESS: "blue", DEBRIS: "dim", UNVERIFIED: "yellow", PART: "yellow", IN_MEMORY: "cyan"}
#: How many folders below an empty root the advice names.
_FOLDERS = 5
#: Search at most so many folders for them, the outer ones first.
_LOOKED_INTO = 200


@dataclass
class Listed:
    """An entry of a folder of checkpoints.

    Attributes:
        name: name in the folder
        state: `committed`; `unverified`, of another program; `damaged`; `part`, of which other hosts have the rest;
            `in progress`; `debris`; `in memory`; or `unknown`, which only has the name of one
        step: step; None: unknown
        time: when it was committed or last changed, seconds since 1970
        nbytes: size
        ranks: number of ranks that saved it; None: unknown
        why: more about the state
        metrics: its metrics
    """

    name: str
    state: str
    step: int | None
    time: float
    nbytes: int
    ranks: int | None = None
    why: str = ""
    metrics: dict[str, float] | None = None


def entries_of(root: Root) -> list[Listed]:
    """The entries of a folder, by step and time; those without a step are last."""
    return sorted(_entries(root), key=order_of)


def order_of(entry: Listed) -> tuple[bool, int, float]:
    """What entries are sorted by."""
    return entry.step is None, entry.step or 0, entry.time


def what_text(root: Root, entry: Listed, more: str = "") -> str:
    """What an entry is, as a cell of a table: `damaged: manifest.json is missing`.

    Args:
        root: its folder
        entry: the entry
        more: what follows the state; empty: why it is in that state
    """
    what = entry.state + (more or (f": {entry.why}" if entry.why else ""))
    # Another entry may have the path of this step, so the step alone does not say which one this is.
    if entry.step is None or os.path.basename(root.paths.get(entry.step, "")) != entry.name:
        what += f" ({entry.name})"
    return what


def advice(root: Root, argument: str, command: str) -> Iterator[str]:
    """For an empty root: the first folders below it that hold checkpoints, such as those of a multirun's jobs.

    Args:
        root: the root
        argument: what names it on the command line
        command: the command to use there
    """
    found, folders = 0, deque([""])
    for _ in range(_LOOKED_INTO):
        above = folders.popleft() if folders else None
        if above is None or found == _FOLDERS:
            return
        try:
            steps = Root(root.fs, os.path.join(root.path, above)).committed if above else {}
            names = [] if steps else root.fs.names(os.path.join(root.path, above))
        except OSError:
            continue  # not ours to read; this is advice only
        if steps:
            found += 1
            yield f"{above}/ holds {len(steps)}: ckpt {command} {os.path.normpath(os.path.join(argument, above))}"
        inner = [os.path.join(above, name) for name in names if not name.startswith(".")]
        folders.extend(each for each in inner if root.fs.is_real_folder(os.path.join(root.path, each)))


def _entries(root: Root) -> Iterator[Listed]:
    for naming, scan in root.scans.items():
        for step in scan.committed:
            name, manifest = naming.folder(step), scan.manifests[step]
            nbytes = sum(entry["size"] for entry in manifest["files"])
            created = created_of(manifest)
            when = _modified(root, name) if created is None else created
            metrics = dict(scan.metrics[step])
            yield Listed(name, COMMITTED, step, when, nbytes, manifest["world_size"], metrics=metrics)
        for step, why in {**scan.damaged, **scan.torn, **scan.unusable}.items():
            name, ranks = naming.folder(step), scan.manifests.get(step, {}).get("world_size")
            yield _examined(root, name, DAMAGED, step, why.replace(f"{os.path.join(root.path, name)}/", ""), ranks)
        for step in scan.parts:
            hosts, ranks = scan.manifests[step]["hosts"], scan.manifests[step]["world_size"]
            yield _examined(root, naming.folder(step), PART, step, f"its files are on {', '.join(hosts)}", ranks)
        yield from (_foreign(root, naming.folder(step)) for step in scan.foreign)
    yield from (_foreign(root, os.path.basename(path)) for path in root.others)
    in_use: dict[str, bool] = {}
    for naming in [*root.scans] or [root.names]:
        in_use |= Unfinished(root.fs, root.path, naming).in_use()
    for name, used in in_use.items():
        if not name.startswith(ALIVE_PREFIX):  # the mark of an attempt that is listed itself
            is_save = "/" in name or name.startswith(STAGING_PREFIX)
            if used:
                why = "being saved" if is_save else "being deleted, or cut off just now"
            else:
                why = f"a {'save' if is_save else 'deletion'} that was cut off"
            yield _examined(root, name, IN_PROGRESS if used else DEBRIS, step_in_name(saved_as(name)), why)
    for name in root.quarantined:
        yield _examined(root, name, DEBRIS, step_in_name(saved_as(name)), "set aside: damaged or rewound")


def _foreign(root: Root, name: str) -> Listed:
    """A checkpoint of another program, or something that only has the name of one."""
    path = os.path.join(root.path, name)
    why = "a link" if root.fs.is_folder(path) and not root.fs.is_real_folder(path) else ""
    return _examined(root, name, UNVERIFIED if is_checkpoint(root.fs, path) else UNKNOWN, step_in_name(name), why)


def _examined(root: Root, name: str, state: str, step: int | None, why: str, ranks: int | None = None) -> Listed:
    """An entry without a readable manifest: time and size are those of its files."""
    nbytes = tree_bytes(root.fs, os.path.join(root.path, name))
    return Listed(name, state, step, _modified(root, name), nbytes, ranks, why)


def _modified(root: Root, name: str) -> float:
    try:
        return root.fs.changed(os.path.join(root.path, name))
    except FileNotFoundError:
        return time.time()  # committed or deleted since
