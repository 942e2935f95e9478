"""How far the training loop of a run has come: where it began, and the last step that it passed to the manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class LastStep(NamedTuple):
    """A step with the state after it, and the metrics for its save."""

    step: int
    state: Mapping[Any, Any]
    metrics: Mapping[str, Any] | None


@dataclass
class RunProgress:
    """How far the loop has come.

    Attributes:
        restored: the step that was restored, or None.
        last: the last step of the loop, or None before the first.
    """

    restored: int | None = None
    last: LastStep | None = None

    @property
    def idle(self) -> int | None:
        """The restored step if no step came after it, so that nothing was trained."""
        return self.restored if self.last is None or self.last.step == self.restored else None
