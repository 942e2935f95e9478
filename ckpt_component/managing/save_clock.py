"""Whether a save is due: by its step, or by the time since the last one, which rank 0 measures for all ranks."""

from __future__ import annotations

import time

from ..core.coordination import Coordinator, StepQuestions
from .policies import SavePolicy


class SaveClock:
    """Decides after each step whether to save.

    Args:
        policy: when to save.
        ranks: the ranks, which save together.
        timeout: seconds to wait for rank 0.

    Attributes:
        last_save: when the last save began (`time.monotonic`), or else the run.
    """

    def __init__(self, policy: SavePolicy, ranks: Coordinator, timeout: float) -> None:
        self.last_save = time.monotonic()
        self._policy = policy
        self._ranks = ranks
        self._timeout = timeout
        self._questions = StepQuestions(ranks, "maybe_save")

    def restart(self) -> None:
        """The run continues from another step, on all ranks."""
        self._questions.restart(self._ranks.meetings["restore"])
        self.last_save = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether to save at this step; the same on all ranks.

        Raises:
            CheckpointTimeoutError: rank 0 did not answer in time.
            RanksError: rank 0 did not call this for the step.
        """
        policy, since = self._policy, self.last_save
        if self._ranks.world_size == 1 or policy.every_seconds is None:
            return policy.should_save(step, time.monotonic() - since)
        # The clocks of the ranks differ, so rank 0 decides.
        deadline = time.monotonic() + self._timeout
        return bool(self._questions.ask(step, lambda: policy.should_save(step, time.monotonic() - since), deadline))
