"""`ckpt ls ROOT`: list a folder of checkpoints, and what else is there.

List the checkpoints of a folder, oldest first: committed; unverified (of another program, without checksums); damaged;
in progress; and debris that killed runs left, which ckpt gc deletes.

example:
  ckpt ls checkpoints
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..core.commit.cleanup import Unfinished
from ..core.commit.names import ALIVE_PREFIX, STAGING_PREFIX, saved_as, step_in_name
from ..core.formats.checkpoints import Root, created_of, find_root, is_checkpoint
from ..core.storage.locate import is_url
from ..core.storage.space import amount
from .output import Output
from .roots import tree_bytes
from .text import Table, age_text, counted

COMMITTED, UNVERIFIED, DAMAGED, IN_PROGRESS, DEBRIS = "committed", "unverified", "damaged", "in progress", "debris"
#: What only has the name of a checkpoint.
UNKNOWN = "unknown"
#: How many folders below an empty root the advice names.
_FOLDERS = 5
_STYLES = {DAMAGED: "red", IN_PROGRESS: "blue", DEBRIS: "dim", UNVERIFIED: "yellow"}


@dataclass
class Listed:
    """An entry of a folder of checkpoints.

    Attributes:
        name: name in the folder
        state: `committed`; `unverified`, of another program; `damaged`; `in progress`; `debris`; or `unknown`, which
            only has the name of one
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="folder of checkpoints")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """List a folder.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is a checkpoint itself
    """
    root = find_root(parsed.root, parsed.options)
    entries = sorted(_entries(root), key=lambda entry: (entry.step is None, entry.step or 0, entry.time))
    data = {
        "root": root.path,
        "newest": root.newest,
        "best": root.best,
        "metric": None if root.best_policy is None else root.best_policy.metric,
        "entries": [{**asdict(entry), "path": os.path.join(root.path, entry.name)} for entry in entries],
    }
    output.result(data, _lines(root, entries, output))
    if not entries and not is_url(parsed.root):
        output.show(_below(root, parsed.root))


def _below(root: Root, argument: str) -> Iterator[str]:
    """Advice for an empty root: the first folders in it that hold checkpoints."""
    found = 0
    for name in root.fs.names(root.path):
        path = os.path.join(root.path, name)
        if found == _FOLDERS or name.startswith(".") or not root.fs.is_real_folder(path):
            continue
        try:
            steps = Root(root.fs, path).committed
        except OSError:
            continue  # not ours to read; this is advice only
        if steps:
            found += 1
            yield f"{name}/ holds {len(steps)}: ckpt ls {os.path.normpath(os.path.join(argument, name))}"


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
        yield from (_foreign(root, naming.folder(step)) for step in scan.foreign)
    yield from (_foreign(root, os.path.basename(path)) for path in root.others)
    in_use: dict[str, bool] = {}
    for naming in [*root.scans] or [root.names]:
        in_use |= Unfinished(root.fs, root.path, naming).in_use()
    for name, used in in_use.items():
        if not name.startswith(ALIVE_PREFIX):  # the mark of an attempt that is listed itself
            is_save = "/" in name or name.startswith(STAGING_PREFIX)
            if used:
                why = "being saved" if is_save else "being deleted"
            else:
                why = f"a {'save' if is_save else 'deletion'} that was cut off"
            yield _examined(root, name, IN_PROGRESS if used else DEBRIS, step_in_name(saved_as(name)), why)
    for name in root.quarantined:
        yield _examined(root, name, DEBRIS, step_in_name(saved_as(name)), "set aside: damaged, or retired by a rewind")


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


def _lines(root: Root, entries: list[Listed], output: Output) -> Iterator[str]:
    if not entries:
        yield f"no checkpoints in {root.path}"
        return
    newest, best = root.newest, root.best
    rows = [("step", "age", "size", "ranks", "what"), *(_row(root, entry, newest, best) for entry in entries)]
    good = (COMMITTED, best)
    styles = [_STYLES.get(entry.state, "green" if (entry.state, entry.step) == good else "") for entry in entries]
    yield from output.table(Table(rows, left=(4,)), styles)
    yield ""
    yield _summary(entries)


def _row(root: Root, entry: Listed, newest: int | None, best: int | None) -> tuple[str, ...]:
    what = entry.state
    if entry.state == COMMITTED:
        if entry.step == newest:
            what += ", newest"
        if entry.step == best and root.best_policy is not None and entry.metrics:
            what += f", best ({root.best_policy.metric} {entry.metrics[root.best_policy.metric]:g})"
    elif entry.why:
        what += f": {entry.why}"
    # Another entry may have the path of this step, so the step alone does not say which one this is.
    if entry.step is None or os.path.basename(root.paths.get(entry.step, "")) != entry.name:
        what += f" ({entry.name})"
    step = "" if entry.step is None else str(entry.step)
    ranks = "" if entry.ranks is None else str(entry.ranks)
    return step, age_text(time.time() - entry.time), amount(entry.nbytes), ranks, what


def _summary(entries: list[Listed]) -> str:
    """`3 checkpoints, 4.50 GB; 1 damaged; 2 debris, 1.20 GB`."""
    good = [entry for entry in entries if entry.state in (COMMITTED, UNVERIFIED)]
    parts = [f"{counted(len(good), 'checkpoint')}, {amount(sum(each.nbytes for each in good))}"]
    for state in (DAMAGED, IN_PROGRESS, DEBRIS):
        group = [entry for entry in entries if entry.state == state]
        if group:
            size = f", {amount(sum(each.nbytes for each in group))}" if state == DEBRIS else ""
            parts.append(f"{len(group)} {state}{size}")
    return "; ".join(parts)
