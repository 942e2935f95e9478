"""The figures of a run: what its saves cost, phase by phase, and what share of its time training kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from .records import PHASES, Run, Save


def figures_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures of all runs of a folder, as plain data. Times are in seconds, points in time since 1970.

    Each has those of `figures_of`, and `idle_s` and `repeated_steps`: what the end of the run before has cost.
    """
    figures = []
    for number, run in enumerate(runs):
        before = runs[number - 1] if number else None
        mine = figures_of(run)
        mine["idle_s"] = None if before is None else max(run.began - before.ended, 0.0)
        mine["repeated_steps"] = None
        if before is not None and before.leader.ends and mine["first_step"] is not None:
            mine["repeated_steps"] = max(before.leader.ends[-1][0] - mine["first_step"] + 1, 0)
        figures.append(mine)
    return figures


def figures_of(run: Run) -> dict[str, Any]:
    """The figures of a run, as plain data; None for what is not known."""
    saves = saves_of(run)
    ends, outcomes = run.leader.ends, Counter(save["outcome"] for save in saves)
    committed = [save for save in saves if save["outcome"] == "committed"]
    training_s = lost_s = kept = None
    if len(ends) > 1:
        first, last = ends[0][1], ends[-1][1]
        within = [save for save in saves if first <= save["time"] <= last or save["step"] == ends[-1][0]]
        # The last step's save made training wait too.
        training_s = max([last, *(save["time"] + save["stall_s"] for save in within)]) - first
        lost_s = sum(save["lost_s"] for save in within)
        kept = max(1 - lost_s / training_s, 0.0) if training_s > 0 else None
    alone, saving = _step_times(run)
    write_s = sum(save["write_s"] + (save["sync_s"] or 0) for save in committed if save["write_s"])
    return {
        "run": run.token,
        "preset": run.preset,
        "versions": dict(run.versions),
        "world_size": run.world_size,
        "hosts": sorted({log.host for log in run.ranks.values() if log.host}),
        "began": run.began,
        "ended": run.ended,
        "first_step": ends[0][0] if ends else None,
        "last_step": ends[-1][0] if ends else None,
        "training_s": training_s,
        "step_s": median(alone) if alone else None,
        "step_saving_s": median(saving) if saving else None,
        "lost_s": lost_s,
        "stall_s": sum(save["stall_s"] for save in saves),
        "kept": kept,
        "committed": outcomes["committed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "retried": sum(save["attempts"] > 1 for save in saves),
        "bytes": sum(save["bytes"] for save in committed),
        "gbps": sum(save["bytes"] for save in committed) / 1e9 / write_s if write_s else None,
        "saves": saves,
        "loads": loads_of(run),
        "other": dict(Counter(kind for log in run.ranks.values() for _, kind, _ in log.notes)),
    }


def saves_of(run: Run) -> list[dict[str, Any]]:
    """Every save of all ranks as one: the longest time of each phase, the bytes of all, the first error."""
    groups: dict[tuple[str, int], list[Save]] = defaultdict(list)
    for log in run.ranks.values():
        seen: Counter[str] = Counter()
        for save in log.saves:
            groups[save.path, seen[save.path]].append(save)  # a step may be saved again after a failure
            seen[save.path] += 1
    return sorted(map(_together, groups.values()), key=lambda save: save["time"])


def _together(saves: Sequence[Save]) -> dict[str, Any]:
    failed = next((save for save in saves if save.error is not None), None)
    first = saves[0] if failed is None else failed
    write_s = _longest([save.phase_s("write", "sync") for save in saves])
    nbytes = sum(save.nbytes for save in saves)
    return {
        "step": first.step,
        "time": min(save.time for save in saves),
        "path": first.path,
        "outcome": first.outcome,
        "error": None if failed is None else f"rank {failed.rank}: {failed.error}" if len(saves) > 1 else failed.error,
        "ranks": len(saves),
        "bytes": nbytes,
        "attempts": max(save.attempts for save in saves),
        "stall_s": max(save.stall_s for save in saves),
        # Without the steps after it, what a save has cost is at least what it made training wait.
        "lost_s": max(save.stall_s if save.lost_s is None else save.lost_s for save in saves),
        **{f"{phase}_s": _longest([save.phase_s(phase) for save in saves]) for phase in PHASES},
        "durable_s": max(save.seconds for save in saves) if failed is None else None,
        "gbps": nbytes / 1e9 / write_s if write_s and failed is None else None,
    }


def loads_of(run: Run) -> list[dict[str, Any]]:
    """Every load of all ranks as one: the longest time, and the size of the checkpoint."""
    loads: dict[tuple[str, int | None], list[Any]] = defaultdict(list)
    for log in run.ranks.values():
        for load in log.loads:
            loads[load.path, load.step].append(load)
    return [
        {
            "step": step,
            "time": min(load.time for load in group),
            "path": path,
            "bytes": (nbytes := max(load.nbytes for load in group)),
            "seconds": (seconds := max(load.seconds for load in group)),
            "gbps": nbytes / 1e9 / seconds if seconds else None,
            "error": next((load.error for load in group if load.error is not None), None),
            "verified": all(load.verified for load in group),
        }
        for (path, step), group in loads.items()
    ]


def _longest(seconds: Sequence[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)


def _step_times(run: Run) -> tuple[list[float], list[float]]:
    """The duration of the leading rank's steps: of those beside no save, and of those during one."""
    alone, saving = list[float](), list[float]()
    busy = [(save.time, save.time + save.seconds) for save in run.leader.saves]
    at = 0
    for step in run.leader.steps():
        while at < len(busy) and busy[at][1] <= step.begin:
            at += 1
        beside = at < len(busy) and busy[at][0] < step.end
        (saving if beside else alone).append(step.end - step.begin)
    return alone, saving
