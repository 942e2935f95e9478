"""`ckpt memory ls | show | drop`: the snapshots that runs have in the memory of this host.

Show the snapshots in memory on this host (checkpoint/recovery=host): `ls` lists their servers, of a run's folder or of
all your runs; `show` shows the keys of one, as ckpt show does; `drop` deletes them, so that the next start resumes from
what is on disk.

example:
  ckpt memory ls
  ckpt memory show checkpoints@120 'model.*'
  ckpt memory drop checkpoints --step 120
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core.outside import OUTSIDE
from ..core.spelling import closest
from ..core.storage.locate import absolute, storage_at
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointNotFoundError
from ..formats.checkpoints import NEWEST, Root
from . import show_command
from .memory_runs import RunInMemory, runs_in_memory, runs_of
from .output import Output
from .roots import shown
from .text import Table, age_text, counted, wait_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", metavar="ACTION", help="ls, show or drop")
    parser.add_argument(
        "root", metavar="ROOT", nargs="?", help="folder of a run's checkpoints; show takes ROOT@120 too"
    )
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="show: as for ckpt show")
    parser.add_argument("--step", type=int, metavar="N", help="drop: the snapshot of step N; without it, all of ROOT")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Do what `action` says.

    Raises:
        CheckpointConfigError: there is no such action, or it does not take an argument
        CheckpointNotFoundError: there is no such snapshot
    """
    action = ACTIONS.get(parsed.action)
    if action is None:
        near = closest(parsed.action, ACTIONS)
        hint = f"did you mean ckpt memory {near}?" if near else f"type one of {', '.join(ACTIONS)}."
        raise CheckpointConfigError(f"ckpt memory has no action '{parsed.action}'; {hint}")
    if parsed.pattern is not None and parsed.action != "show":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} does not take '{parsed.pattern}'; only show does.")
    if parsed.step is not None and parsed.action != "drop":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} does not take --step; only drop does.")
    if parsed.root is None and parsed.action != "ls":
        raise CheckpointConfigError(f"ckpt memory {parsed.action} needs the run's folder; ckpt memory ls lists them.")
    action(parsed, output)


def _list(parsed: argparse.Namespace, output: Output) -> None:
    runs = runs_in_memory() if parsed.root is None else runs_of(parsed.root, absolute(parsed.root), parsed.options)
    rows = {run.token: [*_rows(run)] for run in runs}
    host = OUTSIDE.host_name()
    data = {"host": host, "keepers": [row for each in rows.values() for row in each]}
    output.result(data, _lines(runs, rows, host, output))


def _rows(run: RunInMemory) -> Iterator[dict[str, Any]]:
    """What is known of each server, as values of JSON."""
    unknown = dict.fromkeys(("world_size", "host", "pid", "since", "bytes", "alive", "gone", "lease", "holders"))
    for rank in sorted([*run.about, *run.silent]):
        about = run.about.get(rank)
        known = unknown if about is None else {name: about.get(name) for name in unknown}
        yield {
            **{"root": run.root, "token": run.token, "rank": rank, "answers": about is not None},
            **{"steps": [] if about is None else run.steps_of(rank), **known},
            "copies": [] if about is None else run.copies_of(rank),
            # Servers of earlier releases do not say it.
            "waits": [] if about is None else about.get("waits", []),
        }


def _lines(
    runs: Sequence[RunInMemory], rows: Mapping[str, Sequence[Mapping[str, Any]]], host: str, output: Output
) -> Iterator[str]:
    if not runs:
        yield f"no snapshots in memory on {host}"
    for number, run in enumerate(runs):
        if number:
            yield ""
        yield output.style(run.root or "a run whose snapshot servers do not answer", "bold")
        present = len(run.about) + len(run.silent)
        ranks = (
            counted(present, "rank") if run.world_size is None else f"{present} of {counted(run.world_size, 'rank')}"
        )
        yield f"  {ranks} on {host}, run {run.token}"
        if run.parts:
            yield f"  of step {_listed(run.parts)} only a part is here: the rest is on other hosts"
        cells = [
            (str(row["rank"]), _listed(row["steps"]), _size_text(row), _trainer_text(row)) for row in rows[run.token]
        ]
        yield from output.table(
            Table([("rank", "step", "size", "trainer"), *cells], left=(3,)),
            ["" if row["answers"] else "red" for row in rows[run.token]],
        )
        for row in rows[run.token]:
            yield from (f"  rank {row['rank']}'s snapshot server {wait_text(wait)}" for wait in row["waits"])
        copies = [
            (str(copy.rank), copy.host or "another", _listed(copy.steps), amount(copy.bytes), f"rank {row['rank']}'s")
            for row in rows[run.token]
            for copy in row["copies"]
        ]
        if copies:
            titles = ("copies of rank", "of host", "step", "size", "in the memory of")
            yield from output.table(Table([titles, *copies], left=(1, 4)))


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _size_text(row: Mapping[str, Any]) -> str:
    """What a server has of its own rank."""
    return amount(row["bytes"] - sum(copy.bytes for copy in row["copies"])) if row["answers"] else ""


def _trainer_text(row: Mapping[str, Any]) -> str:
    if not row["answers"]:
        return "unknown: the snapshot server does not answer"
    if row["alive"]:
        return "alive"
    gone = f"gone for {age_text(time.time() - row['gone'])}" if row["gone"] is not None else "gone"
    return f"{gone}; the snapshot stays for {age_text(row['lease'])}" + (", in use" if row["holders"] else "")


def _show(parsed: argparse.Namespace, output: Output) -> None:
    argument, at, word = parsed.root.rpartition("@")
    if not at or runs_in_memory(absolute(parsed.root), parsed.options):
        argument, word = parsed.root, NEWEST
    if word != NEWEST and not (word.isdecimal() and word.isascii()):
        raise CheckpointConfigError(f"'{word}' after the @ picks no snapshot; type {argument}@120, or {argument}.")
    step = None if word == NEWEST else int(word)
    run, chosen = _with_snapshot(argument, runs_of(argument, absolute(argument), parsed.options), step)[0]
    path = run.snapshots.paths[chosen[-1]]
    named = argparse.Namespace(
        checkpoint=path, pattern=parsed.pattern, depth=None, flat=False, config=False, options=parsed.options
    )
    show_command.run(named, output)


def _drop(parsed: argparse.Namespace, output: Output) -> None:
    root = absolute(parsed.root)
    runs = runs_of(parsed.root, root, parsed.options)
    dropped, lines = list[dict[str, Any]](), list[str]()
    for run, steps in _with_snapshot(parsed.root, runs, parsed.step, parts=True):
        for step in steps:
            nbytes = run.drop(step)
            dropped.append({"root": run.root, "token": run.token, "step": step, "bytes": nbytes})
            lines.append(f"dropped step {step} of {shown(root)} from memory: {amount(nbytes)}")
    if elsewhere := any(run.world_size != len(run.about) for run in runs):
        lines.append("other hosts may have all of it, in copies too: type the same on each of them")
    memory = max((step for run in runs if run.is_owner for step in run.steps), default=-1)
    disk = Root(storage_at(root, options=parsed.options), root)
    durable = -1 if disk.newest is None else disk.newest
    newest = max(memory, durable)
    place = "memory" if newest == memory else shown(disk.paths[newest])
    lines.append(
        f"the next start resumes from step {newest} ({place})"
        if newest >= 0
        else f"{shown(root)} has no checkpoint: the next start begins anew"
    )
    source = None if newest < 0 else "memory" if newest == memory else "disk"
    resumes = {"resumes_from": None if newest < 0 else newest, "source": source, "elsewhere": elsewhere}
    output.result({"dropped": dropped, **resumes}, lines)


def _with_snapshot(
    argument: str, runs: Sequence[RunInMemory], step: int | None, *, parts: bool = False
) -> list[tuple[RunInMemory, list[int]]]:
    """The runs that have whole snapshots, of one step or of any, with their steps.

    Args:
        argument: what names the runs, for errors
        runs: the runs
        step: the step; None: any
        parts: count those whose rest is on other hosts, too
    """
    present = [(run, [*run.steps, *(run.parts if parts else ())]) for run in runs]
    found = [(run, [each for each in steps if step in (None, each)]) for run, steps in present]
    found = [(run, steps) for run, steps in found if steps]
    if found:
        return found
    if here := sorted({each for run in runs for each in run.parts if step in (None, each)}):
        raise CheckpointNotFoundError(
            f"The memory of this host has only a part of step {_listed(here)} of {argument}: the rest is on other "
            "hosts, where a run finds it; ckpt memory ls lists what is here."
        )
    steps = sorted({each for run in runs for each in run.steps})
    if step is None or not steps:
        raise CheckpointNotFoundError(
            f"The memory of this host has no whole snapshot of {argument}; ckpt ls {argument} shows what is on disk."
        )
    raise CheckpointNotFoundError(
        f"The memory of this host has no snapshot of step {step} of {argument}; it has {', '.join(map(str, steps))}."
    )


#: What `ckpt memory` does, by the word for it.
ACTIONS: Mapping[str, Callable[[argparse.Namespace, Output], None]] = {"ls": _list, "show": _show, "drop": _drop}
