"""Which checkpoints to keep: the newest, some permanently, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..spelling import closest


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the newest checkpoints, and some permanently.

    Attributes:
        last: how many of the newest to keep; None: all
        every_steps: checkpoints whose step is a multiple are never deleted; None: not used
    """

    last: int | None = 3
    every_steps: int | None = None

    def newest(self, committed: Sequence[int]) -> list[int]:
        """The steps that are kept because they are the newest; none if all are kept."""
        return [] if self.last is None else sorted(committed)[-max(self.last, 1) :]

    def to_delete(self, committed: Sequence[int], best: Collection[int] = ()) -> list[int]:
        """Which of the committed steps to delete; never the newest.

        Args:
            committed: all of them
            best: steps that are kept as well
        """
        if self.last is None:
            return []
        old = sorted(committed)[: -max(self.last, 1)]
        return [step for step in old if step not in best and (self.every_steps is None or step % self.every_steps)]


@dataclass(frozen=True)
class BestPolicy:
    """How checkpoints are compared. Only what is on disk counts, so a new run finds the best ones of the last run.

    Attributes:
        metric: name of the metric
        largest: whether the largest value is the best, or the smallest
        last: how many of the best to keep
    """

    metric: str
    largest: bool = False
    last: int = 1

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps that have the metric, the best first; NaN counts as none, and of equal values the first is better.

        Args:
            metrics: step -> metrics of its checkpoint
        """
        values = {step: named[self.metric] for step, named in metrics.items() if self.metric in named}
        sign = -1 if self.largest else 1
        return sorted(
            (step for step, value in values.items() if not math.isnan(value)),
            key=lambda step: (sign * values[step], step),
        )

    def why_never(self, metrics: Mapping[str, float]) -> str | None:
        """Why a checkpoint with these metrics is never the best; None if it may be."""
        if self.metric in metrics:
            return f"its metric '{self.metric}' is NaN" if math.isnan(metrics[self.metric]) else None
        return f"it has no metric '{self.metric}'{self.others(metrics)}"

    def others(self, names: Mapping[str, object]) -> str:
        """What to add to a text about a missing metric: the metrics that are there, or what is probably meant."""
        if not names:
            return ""
        guess = closest(self.metric, names)
        if guess is not None:
            return f" (did you mean checkpoint.keep.best.metric={guess}?)"
        return f", only {', '.join(map(repr, sorted(names)))}"
