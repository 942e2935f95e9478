"""`ckpt ls`, a folder of checkpoints and what else is there; `ckpt du`, what the files of checkpoints take."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from ..core.commit.cleanup import Unfinished
from ..core.commit.names import ALIVE_PREFIX, QUARANTINE_PREFIX, STAGING_PREFIX, saved_as, step_in_name
from ..core.storage.locate import absolute, is_url, storage_at
from ..core.storage.space import amount
from ..core.storage.storage import Storage, StoredFile
from ..formats.checkpoints import Root, created_of, find_root, is_checkpoint
from ..hosts.wire import roots_here
from ..publishing.versions import NAMES, Version, Versions
from .output import Output, Table, age_text, counted
from .roots import Usage, files_in, shown, tree_bytes, usage_of

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


def has_versions(storage: Storage, path: str) -> bool:
    """Whether a folder has versions of published weights; none of those that have names of steps is one."""
    return any(NAMES.step_of(name) is not None for name in storage.names(path))


def list_versions(storage: Storage, path: str, output: Output) -> None:
    """Print the versions in a folder, oldest first; those that are damaged are warnings."""
    versions = [*Versions(storage, path).look().values()]
    output.result({"root": path, "versions": [*map(_data, versions)]}, _version_lines(path, versions, output))


def _data(version: Version) -> dict[str, Any]:
    names = ("number", "base", "step", "path", "nbytes", "created", "committed")
    return {name: getattr(version, name) for name in names}


def _version_lines(path: str, versions: Sequence[Version], output: Output) -> Iterator[str]:
    if not versions:
        yield f"no versions in {path}"
        return
    rows = [("version", "step", "age", "size", "what"), *map(_version_row, versions)]
    yield from output.table(Table(rows, left=(4,)), ["green" if each.is_whole else "" for each in versions])
    yield ""
    whole = sum(version.is_whole for version in versions)
    yield f"{counted(len(versions), 'version')}, {whole} whole, {amount(sum(version.nbytes for version in versions))}"


def _version_row(version: Version) -> tuple[str, ...]:
    what = "whole" if version.is_whole else f"changes of version {version.base}"
    step = "" if version.step is None else str(version.step)
    return str(version.number), step, age_text(time.time() - version.created), amount(version.nbytes), what


logger = logging.getLogger(__name__)


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="folder of checkpoints")


def run_ls(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt ls ROOT`: list a folder of checkpoints, and what else is there.

    List the checkpoints of a folder, oldest first: committed; unverified (of another program, without checksums);
    damaged; a part, of which other hosts have the rest; in progress; debris that killed runs left, which ckpt gc
    deletes; and snapshots that this host has in memory. Of published weights (checkpoint.publish.to) list the versions.

    example:
      ckpt ls checkpoints
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
        from .memory_command import runs_in_memory  # which most folders need not wait for

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


#: Of a table's row for what belongs to no checkpoint.
_OTHERS = "other files"


@dataclass(frozen=True)
class UsedRoot:
    """A folder of checkpoints and its files.

    Attributes:
        root: the folder
        entries: what is in it
        files: the files of each entry, by its name; at the empty name, the files of none
    """

    root: Root
    entries: Sequence[Listed]
    files: Mapping[str, Sequence[StoredFile]]

    @property
    def all_files(self) -> list[StoredFile]:
        """The files of the folder."""
        return [*chain.from_iterable(self.files.values())]

    def usage_of(self, *names: str) -> Usage:
        """The space that some entries take together."""
        return usage_of(chain.from_iterable(self.files.get(name, ()) for name in names))

    @property
    def set_aside(self) -> Usage:
        """The space of damaged and retired checkpoints."""
        return self.usage_of(*(each.name for each in self.entries if each.name.startswith(QUARANTINE_PREFIX)))

    @property
    def unfinished(self) -> Usage:
        """The space of saves and deletions that are in progress, or were cut off."""
        names = [each.name for each in self.entries if each.state in (IN_PROGRESS, DEBRIS)]
        return self.usage_of(*(name for name in names if not name.startswith(QUARANTINE_PREFIX)))


def du_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("roots", metavar="ROOT", nargs="*", default=["."], help="folders of checkpoints; default: .")


def run_du(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt du [ROOT...]`: what folders of checkpoints take, where checkpoints share files.

    Show for each checkpoint its size, what deleting it would free, and what other checkpoints have too; then what the
    folder takes, with each file counted once. Several folders are compared with each other.

    example:
      ckpt du checkpoints

    Only a file system has files that are shared. In a bucket, every checkpoint
    takes its size.
    """
    used = [_used(find_root(argument, parsed.options)) for argument in parsed.roots]
    together = usage_of({file.path: file for each in used for file in each.all_files}.values())
    data = {
        "roots": [_as_data(each) for each in used],
        "bytes": together.taken,
        "unshared_bytes": together.size,
    }
    output.result(data)
    for argument, each in zip(parsed.roots, used, strict=True):
        output.show(_used_lines(each, output, titled=len(used) > 1))
        if not each.entries and not is_url(argument):
            output.show(advice(each.root, argument, "du"))
    if len(used) > 1:
        output.show(["", f"together: {_taken(together)}"])


def _used(root: Root) -> UsedRoot:
    entries = entries_of(root)
    names, files = {entry.name for entry in entries}, defaultdict[str, list[StoredFile]](list)
    base = root.path if is_url(root.path) else os.path.realpath(root.path)
    for file in files_in(root.fs, root.path):
        first, _, rest = file.path.removeprefix(base).lstrip("/").partition("/")
        attempt = f"{first}/{rest.partition('/')[0]}"  # an attempt is inside of the folder of its step
        files[attempt if attempt in names else first if first in names else ""].append(file)
    return UsedRoot(root, entries, files)


def _as_data(used: UsedRoot) -> dict[str, Any]:
    whole = usage_of(used.all_files)
    entries = [(entry, used.usage_of(entry.name)) for entry in used.entries]
    return {
        "root": used.root.path,
        "entries": [
            {
                "name": entry.name,
                "path": os.path.join(used.root.path, entry.name),
                "state": entry.state,
                "step": entry.step,
                "bytes": usage.taken,
                "only_bytes": usage.freed,
                "shared_bytes": usage.shared,
            }
            for entry, usage in entries
        ],
        "other_bytes": used.usage_of("").taken,
        "unfinished_bytes": used.unfinished.freed,
        "set_aside_bytes": used.set_aside.freed,
        "bytes": whole.taken,
        "unshared_bytes": whole.size,
        "elsewhere_bytes": whole.shared,
    }


def _used_lines(used: UsedRoot, output: Output, *, titled: bool) -> Iterator[str]:
    if titled:
        yield from ("", output.style(shown(used.root.path), "bold"))
    if used.entries:
        usages = [used.usage_of(entry.name) for entry in used.entries]
        rows = [
            ["" if entry.step is None else str(entry.step), *_cells(usage), what_text(used.root, entry)]
            for entry, usage in zip(used.entries, usages, strict=True)
        ]
        if (others := used.usage_of("")).size:
            rows.append(["", *_cells(others), _OTHERS])
        rows.insert(0, ["step", "size", "only", "shared", "what"])
        if not any(usage.shared for usage in usages):
            rows = [[*row[:2], row[-1]] for row in rows]
        styles = [STYLES.get(entry.state, "") for entry in used.entries]
        yield from output.table(Table(rows, left=(-1,)), [*styles, "dim"])
        yield ""
    yield _taken(usage_of(used.all_files))
    rest = ((used.unfinished, "unfinished", "gc"), (used.set_aside, "set aside", "rm"))
    freed = [f"{amount(usage.freed)} {what} (ckpt {command})" for usage, what, command in rest if usage.size]
    if freed:
        yield f"deleting would free: {', '.join(freed)}"


def _cells(usage: Usage) -> tuple[str, str, str]:
    return amount(usage.taken), amount(usage.freed), amount(usage.shared)


def _taken(usage: Usage) -> str:
    """The line of totals: `takes 4.64 MB; without shared files it would take 25.71 MB`."""
    parts = [f"takes {amount(usage.taken)}"]
    if usage.size > usage.taken:
        parts.append(f"without shared files it would take {amount(usage.size)}")
    if usage.shared:
        parts.append(f"{amount(usage.shared)} of it is in other folders too")
    return "; ".join(parts if len(parts) > 1 else [*parts, "no file is shared"])
