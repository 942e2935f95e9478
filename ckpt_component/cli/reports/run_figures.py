"""The figures of a run: what its saves cost, phase by phase, and what share of its time training kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .run_records import PHASES, RecordedSave, Run


def figures_of(run: Run) -> dict[str, Any]:
    """The figures of a run, as plain data: times in seconds, points in time since 1970; None for what is not known."""
    saves, ends = [_of_all_ranks(save) for save in run.saves()], run.leader.ends
    snapshots = [_of_all_ranks(save) for save in run.saves(memory=True)]
    outcomes = Counter(save["outcome"] for save in saves)
    committed = [save for save in saves if save["outcome"] == "committed"]
    training_s = lost_s = kept = None
    if len(ends) > 1:
        first, last = ends[0][1], ends[-1][1]
        within = [save for save in (*saves, *snapshots) if first <= save["time"] <= last or save["step"] == ends[-1][0]]
        # The last step's save made training wait too.
        training_s = max([last, *(save["time"] + save["stall_s"] for save in within)]) - first
        lost_s = sum(save["lost_s"] for save in within)
        kept = max(1 - lost_s / training_s, 0.0) if training_s > 0 else None
    steps = [step.end - step.begin for step in run.leader.steps()]
    write_s = sum(save["write_s"] + (save["sync_s"] or 0) for save in committed if save["write_s"])
    nbytes = sum(save["bytes"] for save in committed)
    return {
        "run": run.token,
        "preset": run.preset,
        "world_size": run.world_size,
        "hosts": run.hosts,
        "began": run.began,
        "ended": run.ended,
        "first_step": ends[0][0] if ends else None,
        "last_step": ends[-1][0] if ends else None,
        "training_s": training_s,
        "step_s": median(steps) if steps else None,
        "lost_s": lost_s,
        "stall_s": sum(save["stall_s"] for save in (*saves, *snapshots)),
        "kept": kept,
        "committed": outcomes["committed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "retried": sum(save["attempts"] > 1 for save in saves),
        "bytes": nbytes,
        "reused": sum(save["reused"] for save in committed),
        "gbps": nbytes / 1e9 / write_s if write_s else None,
        "saves": saves,
        "in_memory": _in_memory(snapshots) if snapshots else None,
        "at_peers": _at_peers(run.leader.at_peers) if run.leader.at_peers else None,
        "loads": [load.event() for load in run.leader.loads],
        "uploads": run.leader.uploads,
        "published": _published(run.leader.published) if run.leader.published else None,
        "waits": [
            {"rank": rank, "for": whom, "since": since, "until": until}
            for rank, log in sorted(run.ranks.items())
            for (whom, since), until in log.waits.items()
        ],
    }


def _in_memory(snapshots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the saves to memory alone, of which there may be one for each step."""
    whole = [save for save in snapshots if save["outcome"] == "committed"]
    return {
        "whole": len(whole),
        "failed": len(snapshots) - len(whole),
        "stall_s": median(save["stall_s"] for save in snapshots),
        "whole_s": median(save["durable_s"] for save in whole) if whole else None,
        "errors": sorted({save["error"] for save in snapshots if save["error"] is not None}),
    }


def _at_peers(arrived: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the snapshots that were at their peers, as the leading rank has seen them."""
    return {
        "arrived": len(arrived),
        "step": arrived[-1]["step"],
        "at_peers_s": median(each["at_peers_s"] for each in arrived),
        "sent": sum(each["sent"] for each in arrived),
    }


def _published(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the versions that were published, of which there may be one for each step."""
    versions = [event for event in events if event["error"] is None]
    last = versions[-1] if versions else {}
    return {
        "versions": len(versions),
        "whole": sum(bool(event["whole"]) for event in versions),
        "version": last.get("version"),
        "step": last.get("step"),
        "bytes": sum(event["bytes"] for event in versions),
        "whole_bytes": sum(event["whole_bytes"] for event in versions),
        "seconds": median(event["seconds"] for event in versions) if versions else None,
        "lag": median(event["lag"] for event in versions) if versions else None,
        "skipped": sum(event["skipped"] or 0 for event in versions),
        "errors": sorted({event["error"] for event in events if event["error"] is not None}),
    }


def _of_all_ranks(saves: Sequence[RecordedSave]) -> dict[str, Any]:
    """A save: the longest time of each phase, the bytes of all ranks, the first error."""
    failed = next((save for save in saves if save.error is not None), None)
    first = saves[0] if failed is None else failed
    write_s = _longest([save.phase_s("write", "sync") for save in saves])
    nbytes = sum(save.bytes for save in saves)
    return {
        "step": first.step,
        "time": min(save.time for save in saves),
        "path": first.path,
        "outcome": first.outcome,
        "error": None if failed is None else f"rank {failed.rank}: {failed.error}" if len(saves) > 1 else failed.error,
        "ranks": len(saves),
        "bytes": nbytes,
        "reused": sum(save.reused for save in saves),
        "attempts": max(save.attempts for save in saves),
        "stall_s": max(save.stall_s for save in saves),
        "lost_s": max(max(save.stall_s, save.lost_s) for save in saves),
        **{f"{phase}_s": _longest([save.phase_s(phase) for save in saves]) for phase in PHASES},
        "durable_s": max(save.seconds for save in saves) if failed is None else None,
        "gbps": nbytes / 1e9 / write_s if write_s and failed is None else None,
    }


def _longest(seconds: Sequence[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)
