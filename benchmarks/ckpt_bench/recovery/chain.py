"""The phases of a restart, each from the end of the one before until the last rank has done it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Phase -> the mark that ends it, on the rank that is last. They follow each other.
MARKS: Mapping[str, str] = {
    "respawn": "began",
    "import": "imported",
    "group": "grouped",
    "build": "built",
    "restore": "restored",
    "first_step": "first_step",
}
#: The phases of a restore, by the rank that was the last to begin it; `agree` is what is no other.
RESTORE = ("find", "agree", "verify", "copy")
#: All phases of the chain in their order, which add up to `total`.
PHASES = ("detect", "respawn", "import", "group", "build", *RESTORE, "first_step")


def chain_of(killed: float, gone: float, marks: Mapping[int, Mapping[str, tuple[float, Any]]]) -> dict[str, float]:
    """Seconds of each phase of `PHASES`, and those of `restore` and `total`.

    Args:
        killed: when the processes were killed
        gone: when it was known that all are gone, and the new ones were started
        marks: those of the new processes, by rank
    """
    ends = {phase: max(of_rank[mark][0] for of_rank in marks.values()) for phase, mark in MARKS.items()}
    seconds = {"detect": gone - killed}
    before = gone
    for phase, end in ends.items():
        seconds[phase] = end - before
        before = end
    # Those that began before it have waited for it.
    last = max(marks.values(), key=lambda of_rank: of_rank[MARKS["build"]][0])
    phases: Mapping[str, float] = last[MARKS["restore"]][1]["phases"]
    told = {phase: float(phases.get(phase, 0.0)) for phase in RESTORE if phase != "agree"}
    return {**seconds, **told, "agree": max(seconds["restore"] - sum(told.values()), 0.0), "total": before - killed}
