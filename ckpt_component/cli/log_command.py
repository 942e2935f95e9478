"""`ckpt log ROOT`: which runs saved in a folder, what each resumed from, what changed, and what failed.

Show the runs that saved in a folder, the newest first: the checkpoint that each resumed from, the changes of the
config since, its checkpoints, what it uploaded and published, and what failed.

example:
  ckpt log checkpoints
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from ..formats.checkpoints import find_root
from .lineage import COMMITTED, DELETED, LoggedRun, Saved, runs_of
from .output import Output, fitted
from .text import age_text, clock_text, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", metavar="ROOT", help="folder of checkpoints")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Show the lineage.

    Raises:
        CheckpointNotFoundError: there is no such folder
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
