"""The report of the runs of a folder: lines and tables, and with the extra `plot` a picture and a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...core.storage.space import amount, rate
from ..text import Element, Table, clock_text, counted, duration, wait_text
from .page import write_page
from .run_records import Run
from .run_timeline import picture_of

#: Where a load was from, if not from the disk.
_SOURCES = {"memory": " from memory", "peer": " from peers"}
#: A wait may end so long after its deadline.
_GRACE_SECONDS = 5.0
#: Saves that the text shows, the last ones.
_SHOWN = 15
#: Column -> the times of a save that it shows together.
_COLUMNS = {
    "stall": ("stall_s",),
    "stage": ("plan_s", "stage_s"),
    "queue": ("memory_s", "queue_s"),
    "write": ("write_s",),
    "sync": ("sync_s",),
    "commit": ("vote_s", "commit_s"),
    "durable": ("durable_s",),
    "lost": ("lost_s",),
}
#: Columns that make way in this order where lines would be too long; `--json` has them.
_SPARED = ("queue", "sync", "commit", "rate", "stage", "reused")
_MEANING = (
    "stall: training waited; stage: planned and copied to memory; queue: waited for memory and the writer; write, "
    "sync: to the disk; commit: ranks agreed and it became visible; durable: from the call to the end; lost: stall and "
    "slower steps. Columns that do not fit are left out; --json has them"
)


def blocks(
    folder: Path, figures: Sequence[Mapping[str, Any]], shown: int = -1, limit: int | None = _SHOWN
) -> Iterator[Element]:
    """The lines and tables of the report.

    Args:
        folder: the folder of the checkpoints
        figures: the figures of its runs, the oldest first
        shown: index of the run to describe
        limit: how many saves to show, the last ones; None: all
    """
    yield from _about(folder, figures[shown])
    saves = [save for run in figures for save in run["saves"]]
    yield ""
    if len(figures) > 1:
        yield _runs_table(figures)
        yield f"above: run {range(1, len(figures) + 1)[shown]} of {len(figures)}; --run N shows another"
        yield ""
    if not saves:
        yield "no saves yet"
        return
    listed = saves if limit is None else saves[-limit:]
    yield _saves_table(listed)
    if len(listed) < len(saves):
        yield f"the last {len(listed)} of {len(saves)} saves; --json has all"
    yield _MEANING
    if any(save["reused"] for save in listed):
        yield "reused: not written, because an earlier checkpoint has the same files"
    for save in listed:
        if save["error"] is not None:
            yield f"step {save['step']} {save['outcome']}: {save['error']}"


def _about(folder: Path, run: Mapping[str, Any]) -> Iterator[str]:
    hosts = f" on {', '.join(run['hosts'][:3])}{' ...' if len(run['hosts']) > 3 else ''}" if run["hosts"] else ""
    preset = f", {run['preset']}" if run["preset"] else ""
    ranks = counted(run["world_size"], "rank")
    age = duration(max(time.time() - run["ended"], 0))
    yield f"{folder}: {ranks}{hosts}{preset}, from {clock_text(run['began'])}; last event {age} ago"
    if run["first_step"] is not None:
        pace = "" if run["step_s"] is None else f", median {duration(run['step_s'])}"
        yield f"steps {run['first_step']} to {run['last_step']}{pace}"
    if run["kept"] is not None:
        slower = max(run["lost_s"] - run["stall_s"], 0)
        yield (
            f"training kept {_percent(run['kept'])} of {duration(run['training_s'])}: saves cost "
            f"{duration(run['lost_s'])} (waits {duration(run['stall_s'])}, slower steps {duration(slower)})"
        )
    counts = [f"{run['committed']} committed"]
    counts += [f"{run[name]} {name}" for name in ("failed", "skipped", "retried") if run[name]]
    written = f", {amount(run['bytes'])} at {rate(run['gbps'] * 1e9)}" if run["gbps"] else ""
    reused = f", {amount(run['reused'])} reused" if run["reused"] else ""
    yield f"saves: {', '.join(counts)}{written}{reused}"
    yield from _waits(run["waits"])
    yield from _snapshots(run["in_memory"])
    yield from _peers(run["at_peers"])
    yield from _uploads(run["uploads"])
    yield from _published(run["published"])
    for load in run["loads"]:
        if load["error"] is not None:
            yield f"load of {load['path']} failed: {load['error']}"
        else:
            verified = "verified" if load["verified"] else "not verified"
            size, source = amount(load["bytes"]), _SOURCES.get(load["source"], "")
            yield f"loaded step {load['step']}{source}: {size} in {duration(load['seconds'])}, {verified}"


def _waits(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of waits that last longer than usual. One whose deadline is over has ended, and so has its process."""
    for wait in found:
        if wait["until"] is None or wait["until"] > time.time() - _GRACE_SECONDS:
            yield f"rank {wait['rank']} {wait_text(wait)}"


def _peers(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the snapshots that were at their peers."""
    if found is not None:
        seconds, size = duration(found["at_peers_s"]), amount(found["sent"])
        newest = f"the last: step {found['step']}"
        yield f"at their peers: {found['arrived']}, {newest}; {seconds} after the save, {size} received by rank 0"


def _snapshots(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the saves to memory alone."""
    if found is None:
        return
    failed = f", {found['failed']} failed or skipped" if found["failed"] else ""
    after = "" if found["whole_s"] is None else f", whole after {duration(found['whole_s'])}"
    stall = f"stall {duration(found['stall_s'])}{after} (medians)"
    yield f"in memory alone: {counted(found['whole'], 'snapshot')}{failed}; {stall}"
    for error in found["errors"][:_SHOWN]:
        yield f"not kept in memory: {error}"


def _uploads(uploads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    done = [each for each in uploads if each["error"] is None]
    failed = [each for each in uploads if each["error"] is not None]
    if done:
        last, lag = done[-1], f"{done[-1]['lag_steps']} steps behind"
        size, seconds = amount(sum(each["bytes"] for each in done)), duration(sum(each["seconds"] for each in done))
        yield f"uploads: {len(done)}, {size} in {seconds}; the last: step {last['step']}, then {lag}"
    for each in failed[-_SHOWN:]:
        of_step = "" if each["step"] is None else f" of step {each['step']}"
        yield f"upload{of_step} failed: {each['error']}"


def _published(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the versions for inference."""
    if found is None:
        return
    if found["versions"]:
        skipped = f", {counted(found['skipped'], 'checkpoint')} skipped" if found["skipped"] else ""
        size, whole = amount(found["bytes"]), amount(found["whole_bytes"])
        times = f"{duration(found['seconds'])} each, {duration(found['lag'])} after the commit (medians)"
        yield (
            f"published: {counted(found['versions'], 'version')}, {found['whole']} whole, {size} for {whole}; {times}; "
            f"the last: version {found['version']}, step {found['step']}{skipped}"
        )
    for error in found["errors"][:_SHOWN]:
        yield f"not published: {error}"


def _saves_table(saves: Sequence[Mapping[str, Any]]) -> Table:
    is_reusing = any(save["reused"] for save in saves)
    sizes = ["written", "reused"] if is_reusing else ["size"]
    lines = [["step", "outcome", *sizes, "rate", *_COLUMNS]]
    for save in saves:
        written = "-" if save["gbps"] is None else rate(save["gbps"] * 1e9)
        known = [[save[key] for key in keys if save[key] is not None] for keys in _COLUMNS.values()]
        times = [duration(sum(seconds)) if seconds else "-" for seconds in known]
        reused = [amount(save["reused"])] * is_reusing
        lines.append([str(save["step"]), save["outcome"], amount(save["bytes"]), *reused, written, *times])
    return Table(lines, left=(1,), spared=_SPARED)


def _runs_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    lines = [["run", "from", "ran for", "steps", "saves", "failed", "kept"]]
    for number, run in enumerate(figures, 1):
        steps = "-" if run["first_step"] is None else f"{run['first_step']} to {run['last_step']}"
        kept = "-" if run["kept"] is None else _percent(run["kept"])
        times = clock_text(run["began"]), duration(run["ended"] - run["began"])
        lines.append([str(number), *times, steps, str(run["committed"]), str(run["failed"]), kept])
    return Table(lines, left=())


def write_files(
    runs: Sequence[Run], folder: Path, figures: Sequence[Mapping[str, Any]], shown: int, out: Path
) -> list[Path]:
    """Write the picture and the page of a run, if matplotlib is installed.

    Args:
        runs: the runs of the folder
        folder: as for `blocks`
        figures: as for `blocks`
        shown: as for `blocks`
        out: where to

    Raises:
        OSError: a file cannot be written
    """
    caption, draw = "The last saves, with what training did beside them.", partial(picture_of, runs[shown])
    return write_page(out / "run", draw, "Run", str(folder), caption, blocks(folder, figures, shown, None))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
