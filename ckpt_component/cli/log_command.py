"""`ckpt log ROOT`: which runs saved in a folder, what each resumed from, what changed, and what failed."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.commit.manifest import read_manifest
from ..core.commit.names import RUN_RECORD, saved_as, step_in_name
from ..core.commit.run_record import StoredConfig, stored_config
from ..core.storage.locate import same_folder
from ..core.storage.storage import Storage
from ..errors import CheckpointError
from ..events import checked_events
from ..formats.checkpoints import Root, created_of, find_root
from .diff_command import Change, config_changes
from .output import Output, age_text, clock_text, counted, fitted

COMMITTED, DAMAGED, SET_ASIDE, DELETED = "committed", "damaged", "set aside", "deleted"
#: Events that may have failed -> their outcome if they did not.
_ENDED = {"save": "committed", "load": "loaded", "export": "exported", "upload": "uploaded", "publish": "published"}


@dataclass
class Saved:
    """A checkpoint that a run saved.

    Attributes:
        name: name that it was saved under
        path: where it is; None: it was deleted, or its manifest cannot be read
        step: its step; None: unknown
        time: when it was committed, seconds since 1970
        state: `committed`, `damaged`, `set aside` (quarantined or retired), or `deleted`
        metrics: its metrics
    """

    name: str
    path: str | None
    step: int | None
    time: float
    state: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class LoggedFailure:
    """A save, load, export, upload or version that failed."""

    time: float
    step: int | None
    what: str
    error: str


@dataclass
class LoggedRun:
    """A run that saved in the folder.

    Attributes:
        token: its token; of older checkpoints, what they have in common
        began: when it began, or its first checkpoint was committed, seconds since 1970
        ranks: number of ranks; None: unknown
        resumed_from: name or path of the checkpoint; None: from scratch, or unknown
        parent: number of the run that saved that checkpoint
        resumed_step: its step
        known: whether it is known where the run came from
        later: steps after `resumed_step` that the parent had saved: the run is a branch
        changes: of the config, since that checkpoint
        changed_since: number of the run that has the config before them; the parent, unless it left no checkpoint
        saved: its checkpoints, oldest first
        failures: what failed, oldest first
        uploaded: steps that it uploaded from here to its permanent folder, in order
        published: steps whose weights it published, in order
    """

    token: str
    began: float
    ranks: int | None = None
    resumed_from: str | None = None
    parent: int | None = None
    resumed_step: int | None = None
    known: bool = False
    later: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    changed_since: int | None = None
    saved: list[Saved] = field(default_factory=list)
    failures: list[LoggedFailure] = field(default_factory=list)
    uploaded: list[int | None] = field(default_factory=list)
    published: list[int | None] = field(default_factory=list)


def runs_of(root: Root) -> list[LoggedRun]:
    """The runs that saved in a folder, oldest first."""
    runs: dict[str, LoggedRun] = {}
    for name, path, step, state, manifest in _manifests(root):
        token, created = _token(manifest), created_of(manifest) or 0.0
        run = runs.setdefault(token, LoggedRun(token, created))
        run.began, run.ranks = min(run.began, created), manifest["world_size"]
        run.known, run.resumed_from = "resumed_from" in manifest, manifest.get("resumed_from")
        run.saved.append(Saved(name, path, step, created, state, manifest.get("metrics", {})))
    _add_events(root, runs)
    ordered = sorted(runs.values(), key=lambda run: run.began)
    for run in ordered:
        run.saved.sort(key=lambda saved: (saved.time, saved.step or 0))
        run.failures.sort(key=lambda failure: failure.time)
    for number, run in enumerate(ordered):
        _find_parent(root, ordered, number, run)
    return ordered


def _manifests(root: Root) -> Iterator[tuple[str, str, int | None, str, Mapping[str, Any]]]:
    """Names, paths, steps, states and manifests of the checkpoints that are there."""
    for naming, scan in root.scans.items():
        for step, manifest in scan.manifests.items():
            name, state = naming.folder(step), COMMITTED if step in scan.committed else DAMAGED
            yield name, os.path.join(root.path, name), step, state, manifest
    for name in root.quarantined:
        path, original = os.path.join(root.path, name), saved_as(name)
        try:
            content = read_manifest(root.fs, path)
        except CheckpointError:
            continue  # it was set aside because it is damaged
        if content is not None:
            yield original, path, step_in_name(original), SET_ASIDE, content


def _token(manifest: Mapping[str, Any]) -> str:
    """What identifies the run of a checkpoint: its token; of earlier releases the CRC of the record of the run."""
    records = [entry.get("crc32", 0) for entry in manifest["files"] if entry["name"] == RUN_RECORD]
    return str(manifest.get("run") or f"config-{records[0] if records else 0:08x}")


def _add_events(root: Root, runs: dict[str, LoggedRun]) -> None:
    """Add what the events of rank 0 say about runs, failures and deleted checkpoints."""
    present = {(token, saved.step) for token, run in runs.items() for saved in run.saved}
    there = {path for step, path in root.paths.items() if step not in {number for _, number in present}}
    for event in checked_events(root.path, root.fs):
        token, time, kind = event["run"], event["time"], event["event"]
        if event["rank"] != 0:
            continue
        run = runs.setdefault(token, LoggedRun(token, time))
        run.began = min(run.began, time)
        step, path = event.get("step"), str(event.get("path", ""))
        if kind == "run":
            run.ranks = event["world_size"]
            run.known |= not run.saved  # from scratch, unless a load follows
        elif kind == "load" and event.get("outcome") == "loaded" and not run.saved:
            run.known, run.resumed_from = True, _named(root, path)
        elif kind in _ENDED and event.get("outcome") != _ENDED[kind]:
            of_step = "" if step is None else f" of step {step}"
            what = f"{'snapshot in memory' if event.get('memory') else kind}{of_step} {event.get('outcome')}"
            run.failures.append(LoggedFailure(time, step, what, str(event.get("error") or "")))
        elif kind == "upload":
            run.uploaded.append(step)
        elif kind == "publish":
            run.published.append(step)
        elif kind == "save" and not event.get("memory") and (token, step) not in present:
            name = os.path.basename(path)
            damaged = os.path.join(root.path, name) in there  # its manifest cannot be read
            run.saved.append(Saved(name, None, step, time, DAMAGED if damaged else DELETED))


def _named(root: Root, path: str) -> str:
    return os.path.basename(path) if same_folder(os.path.dirname(path), root.path) else path


def _find_parent(root: Root, runs: list[LoggedRun], number: int, run: LoggedRun) -> None:
    """Find the run that saved the checkpoint from which a run resumed, and what changed since."""
    if run.resumed_from is None:
        return
    run.resumed_step = step_in_name(os.path.basename(run.resumed_from))
    for earlier in range(number - 1, -1, -1):
        if run.resumed_from in {saved.name for saved in runs[earlier].saved}:
            run.parent = earlier
            steps = {saved.step for saved in runs[earlier].saved if saved.step is not None}
            run.later = sorted(step for step in steps if step > (run.resumed_step or 0))
            break
    new, since = _config(root.fs, run), run.parent
    old = _stored(root.fs, os.path.join(root.path, run.resumed_from)) if since is None else None
    while since is not None and old is None:
        old, run.changed_since, since = _config(root.fs, runs[since]), since, runs[since].parent
    if old is not None and new is not None:
        run.changes = config_changes(old, new)


def _config(fs: Storage, run: LoggedRun) -> StoredConfig | None:
    """The config of a run, which all its checkpoints have; None: none is left that can be read."""
    return next(filter(None, (_stored(fs, saved.path) for saved in run.saved if saved.path is not None)), None)


def _stored(fs: Storage, path: str) -> StoredConfig | None:
    try:
        return stored_config(path, fs)
    except CheckpointError:
        return None


def log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="folder of checkpoints")


def run_log(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt log ROOT`: which runs saved in a folder, what each resumed from, what changed, and what failed.

    Show the runs that saved in a folder, the newest first: the checkpoint that each resumed from, the changes of the
    config since, its checkpoints, what it uploaded and published, and what failed.

    example:
      ckpt log checkpoints
    """
    root = find_root(parsed.root, parsed.options)
    runs = runs_of(root)
    output.result({"root": root.path, "runs": runs}, _lines(root.path, root.newest, runs, output))


def _lines(path: str, newest: int | None, runs: list[LoggedRun], output: Output) -> Iterator[str]:
    if not runs:
        yield f"no runs in {path}"
    for number, each in reversed([*enumerate(runs, 1)]):
        ranks = "" if each.ranks is None else f", {counted(each.ranks, 'rank')}"
        yield output.style(f"run {number}", "yellow") + f"  {clock_text(each.began)}{ranks}"
        yield from (fitted(f"  {line}") for line in _about(each))
        gone = [saved for saved in each.saved if saved.state == DELETED]
        lines = [(saved.time, _saved_line(saved, newest), "") for saved in each.saved if saved.state != DELETED]
        lines += [(failure.time, f"{failure.what}: {failure.error}", "red") for failure in each.failures]
        yield from (output.style(fitted(f"  {line}"), style) for _, line, style in sorted(lines, reverse=True))
        if gone:
            yield fitted(f"  deleted since: {', '.join(str(saved.step) for saved in reversed(gone))}")
        if each.uploaded:
            yield fitted(f"  uploaded: {', '.join(map(str, reversed(each.uploaded)))}")
        if each.published:
            yield fitted(f"  published: {', '.join(map(str, reversed(each.published)))}")
        yield ""


def _about(run: LoggedRun) -> Iterator[str]:
    """Where a run came from, and the changes of its config."""
    if not run.known:
        yield "resumed from: unknown, saved by an earlier release"
    elif run.resumed_from is None:
        yield "from scratch"
    else:
        parent = "" if run.parent is None else f" of run {run.parent + 1}"
        branch = ""
        if run.later:
            branch = f", a branch: run {(run.parent or 0) + 1} went on to step {run.later[-1]}"
        yield f"resumed from {run.resumed_from}{parent}{branch}"
    if run.changes and run.changed_since != run.parent:
        yield f"since run {(run.changed_since or 0) + 1}:"
    yield from map(str, run.changes)


def _saved_line(saved: Saved, newest: int | None) -> str:
    metrics = "".join(f"  {name} {value:g}" for name, value in saved.metrics.items() if isinstance(value, (int, float)))
    state = "" if saved.state == COMMITTED else f", {saved.state}"
    state += ", newest" if saved.step == newest and saved.state == COMMITTED else ""
    name = saved.name if saved.step is None else str(saved.step)
    return f"{name}  {age_text(time.time() - saved.time)} ago{state}{metrics}"
