"""Event files of a run that was never made, for what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_component.events import EventFile

#: When the run began: a step takes 20 ms, a save makes training wait for 10 ms and is durable after 100 ms.
BEGAN = 1_700_000_000.0
STEP, STALL = 0.020, 0.010
SPANS = {
    "plan": [0, 0.001],
    "stage": [0.001, STALL],
    "queue": [STALL, 0.012],
    "write": [0.012, 0.07],
    "sync": [0.07, 0.08],
    "vote": [0.08, 0.09],
    "commit": [0.09, 0.1],
}


def write_run(
    root: Path,
    *,
    ranks: int = 1,
    saves: int = 3,
    every: int = 20,
    first: int = 1,
    failed: int = 0,
    began: float = BEGAN,
) -> float:
    """Write the events of a run. Returns when it ended.

    Args:
        root: the folder of the checkpoints.
        ranks: how many.
        saves: how many; each lasts four to five steps.
        every: steps between saves.
        first: the first step; a later one is resumed from the step before.
        failed: number of the save that fails, from 1; 0: none.
        began: when the run began.
    """
    root.mkdir(exist_ok=True)
    now = began
    for rank in range(ranks):
        now = began + 0.001 * rank
        same: dict[str, Any] = {"run": f"run {began:.0f}", "rank": rank}
        about = {"world_size": ranks, "host": "node", "pid": 40 + rank, "versions": {}, "preset": "async_persistent"}
        events: list[dict[str, Any]] = [{"event": "run", "time": now, **same, **about}]
        if first > 1:
            load = {"step": first - 1, "path": "old", "bytes": 10**9, "seconds": 0.5, "spans": {}, "verified": True}
            events.append({"event": "load", "time": now, **same, **load})
        now += 1
        step, ends = first - 1, list[float]()
        for number in range(1, saves + 1):
            for _ in range(every):
                now, step = now + STEP, step + 1
                ends.append(now)
            events.append({"event": "steps", "time": now, **same, "first": step - len(ends) + 1, "ends": ends})
            fails = number == failed
            save = {
                "step": step,
                "path": str(root / f"iter_{step:07d}"),
                "outcome": "failed" if fails else "committed",
                "error": "the disk is full" if fails else None,
                "bytes": 0 if fails else 10**9,
                "attempts": 2 if fails else 1,
                "stall_s": STALL,
                "lost_s": 2 * STALL,
                "spans": {name: span for name, span in SPANS.items() if not fails or span[1] <= 0.07},
            }
            events.append({"event": "save", "time": now, **same, **save})
            now, ends = now + STALL, []
        EventFile(str(root), rank).append(events)
    return now + SPANS["commit"][1] - STALL
