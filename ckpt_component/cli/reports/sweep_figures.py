"""The figures of a job that a report shows; times are in seconds and, unless noted, of one save."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ...config.hydra.hydra_job import multirun_job
from ...core.storage.locate import is_url
from ...errors import CheckpointError
from ...events.reports import SaveReport
from ..output import duration
from .run_records import RecordedSave, read_runs

if TYPE_CHECKING:
    from ...managing.manager import CheckpointManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        column: its column heading in the table
        meaning: its text in the legend
        text: formats a value
    """

    column: str
    meaning: str
    text: Callable[[float], str] = duration


#: By their names in `result.json`.
FIGURES: Mapping[str, Figure] = {
    "first_stall_s": Figure("first stall", "the first save"),
    "stall_s": Figure("stall", "how long a later save kept training waiting (median)"),
    "staged_s": Figure("staged", "until tensors may change"),
    "durable_s": Figure("durable", "until committed, or synced"),
    "gbps": Figure("GB/s", "until durable", "{:.2f}".format),  # gigabytes (1e9) of one rank
    "step_s": Figure("step", "of training, without what it waited"),
    "lost_s": Figure("lost", "training time lost to a save"),
    "step_ratio": Figure("step x", "step time while it is written, over the undisturbed", "{:.2f}".format),
}


def figures_of(
    reports: Sequence[SaveReport], fence_s: float = 0.0, earlier: Sequence[SaveReport] = ()
) -> dict[str, float | None]:
    """The figures of a run's saves; None for figures without a save.

    Args:
        reports: reports of one run, in order; only committed saves count, and none to memory alone
        fence_s: how long optimizer steps waited for snapshots, summed over all saves
        earlier: the saves of the same job before it was interrupted, as `earlier_saves` returns them
    """
    own = [report for report in reports if report.outcome == "committed" and not report.memory]
    saves = [*earlier, *own]
    stalls = [*(report.stall_s for report in earlier), *(report.stall_s + fence_s / len(own) for report in own)]
    durable = median(report.committed_s for report in saves) if saves else None
    return {
        "first_stall_s": stalls[0] if stalls else None,
        "stall_s": median(stalls[1:]) if stalls[1:] else None,
        "staged_s": median(report.staged_s for report in saves) if saves else None,
        "durable_s": durable,
        "gbps": sum(report.bytes for report in saves) / len(saves) / 1e9 / durable if durable else None,
    }


def earlier_saves(manager: CheckpointManager) -> list[RecordedSave]:
    """The saves that led to the checkpoint from which a job of a sweep resumed, in order, as rank 0 recorded them.

    Those of a job in a bucket, or without events, are unknown.
    """
    if manager.restored_from is None or multirun_job() is None:
        return []
    folder = os.path.dirname(manager.path_of(0))
    if is_url(folder):
        return []
    first = min((report.step for report in manager.reports if report.step is not None), default=None)
    try:
        runs = read_runs(Path(folder))
    except CheckpointError as error:
        logger.info("what this job saved before it was interrupted is unknown: %s", error)
        return []
    saves: dict[int | None, RecordedSave] = {}
    for save in (save for run in runs for save in run.leader.saves if save.outcome == "committed" and not save.memory):
        if save.step is not None and (first is None or save.step < first):
            staged_s = save.spans.get("stage", (0.0, 0.0))[1]
            saves[save.step] = replace(save, staged_s=staged_s, committed_s=save.seconds)
    return list(saves.values())
