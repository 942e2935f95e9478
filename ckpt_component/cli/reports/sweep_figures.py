"""The figures of a job that a report shows; times are in seconds and, unless noted, of one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ...events.reports import SaveReport
from ..text import duration


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
