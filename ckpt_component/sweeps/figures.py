"""The figures of a job that a report shows; times are seconds, of one save where nothing else is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .text import duration


@dataclass(frozen=True)
class Figure:
    """One of them.

    Attributes:
        column: its name in the table.
        meaning: for the legend.
        text: how a value is written.
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
