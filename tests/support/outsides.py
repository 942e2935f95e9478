"""An outside whose time a test sets."""

from __future__ import annotations

from ckpt_component.core.outside import Outside


class SetTime(Outside):
    """The real one, except for its time, which passes when a test says so.

    Attributes:
        time: what `now` and `date` return
    """

    def __init__(self, time: float = 1000.0) -> None:
        self.time = time
        self.now = self.date = lambda: self.time
