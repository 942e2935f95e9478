"""Policies: when to save and where to resume; whether a save is due, and the checks of a step."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config.rules import RESUME_WORDS
from ..core.commit.names import MAX_STEP
from ..core.coordination import Coordinator, StepQuestions
from ..core.storage.locate import absolute
from ..errors import CheckpointStepError


@dataclass(frozen=True)
class SavePolicy:
    """Save every `every_steps` steps, or every `every_seconds` seconds, and at the end.

    Attributes:
        every_steps: save if the step is a multiple; None: not used
        every_seconds: save if the last save was that long ago; None: not used
        at_end: save the last step if the `with` block ends without an exception
        overlap: what to do with a save while earlier ones use all memory: `wait`, `skip` or `error`
        kept_every_steps: also keep a snapshot in memory if the step is a multiple; None: only those that are saved
    """

    every_steps: int | None = 100
    every_seconds: float | None = None
    at_end: bool = True
    overlap: str = "wait"
    kept_every_steps: int | None = None

    @property
    def enabled(self) -> bool:
        """Whether the policy makes any saves."""
        return self.at_end or self.every_steps is not None or self.every_seconds is not None

    @property
    def repeats(self) -> bool:
        """Whether the policy saves during the run, not only at its end."""
        return (self.every_steps, self.every_seconds, self.kept_every_steps) != (None, None, None)

    def should_keep(self, step: int) -> bool:
        """Whether to keep a snapshot of this step in memory, if it is not saved."""
        return self.kept_every_steps is not None and step % self.kept_every_steps == 0

    def should_save(self, step: int, seconds_since_last: float) -> bool:
        """Whether to save at this step."""
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_seconds is not None and seconds_since_last >= self.every_seconds


class SaveClock:
    """Decides after each step whether to save.

    Args:
        policy: when to save
        ranks: the ranks, which save together
        timeout: seconds to wait for rank 0

    Attributes:
        last_save: when the last save began (`Outside.now`), or else the run
    """

    def __init__(self, policy: SavePolicy, ranks: Coordinator, timeout: float) -> None:
        self._now = ranks.outside.now
        self.last_save = self._now()
        self._policy = policy
        self._ranks = ranks
        self._timeout = timeout
        self._questions = StepQuestions(ranks, "maybe_save")

    def restart(self) -> None:
        """The run continues from another step, on all ranks."""
        self._questions.restart(self._ranks.meetings["restore"])
        self.last_save = self._now()

    def is_due(self, step: int) -> bool:
        """Whether to save at this step; the same on all ranks.

        Raises:
            CheckpointTimeoutError: rank 0 did not answer in time
            RanksError: rank 0 did not call this for the step
        """
        policy, since = self._policy, self.last_save
        if self._ranks.world_size == 1 or policy.every_seconds is None:
            return policy.should_save(step, self._now() - since)
        # The clocks of the ranks differ, so rank 0 decides.
        deadline = self._now() + self._timeout
        return bool(self._questions.ask(step, lambda: policy.should_save(step, self._now() - since), deadline))


@dataclass(frozen=True)
class ResumePolicy:
    """Where a run begins.

    Attributes:
        choice: `auto` (newest, or from scratch), `must` (newest), `never`, `best` (by `keep.best`), a step, or a path
        rewind: retire the steps that follow the chosen checkpoint
        load_options: `rename`, `prefix` and `ignore` of `Checkpointer.load`, for a choice that `is_exact`
    """

    choice: str | int = "auto"
    rewind: bool = False
    load_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searches(self) -> bool:
        """Whether to load the newest undamaged checkpoint."""
        return self.choice in ("auto", "must")

    @property
    def is_exact(self) -> bool:
        """Whether the choice is one checkpoint, by step or path."""
        return isinstance(self.choice, int) or self.choice not in RESUME_WORDS

    @property
    def path(self) -> str | None:
        """The absolute path or URL of the checkpoint, if the choice is a path, else None."""
        if isinstance(self.choice, int) or self.choice in RESUME_WORDS:
            return None
        return absolute(self.choice)


class ReachedStep(NamedTuple):
    """A step that the loop has reached, with the state after it, and the metrics for its save."""

    number: int
    state: Mapping[Any, Any]
    metrics: Mapping[str, Any] | None


def checked_step(step: object) -> int:
    """Check a step, and return it as a plain int.

    Raises:
        CheckpointStepError: it is not a valid step
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None and isinstance(step, Mapping):
        raise CheckpointStepError("The step comes first: save(step, state).")
    if number is None:
        raise CheckpointStepError(
            f"The step is {step!r:.100}, a {type(step).__name__}; a step is a whole number, such as int(step)."
        )
    if not 0 <= number <= MAX_STEP:
        raise CheckpointStepError(f"The step is {number}; steps go from 0 to {MAX_STEP}, counted by the training loop.")
    return number


def refuse_earlier(step: int, newest: int | None, how: str) -> None:
    """Refuse to save a step below the newest one of this run, whose checkpoint `keep` would prefer to the new one.

    Every rank decides this alone, from the steps that it was called with; so it does not matter whether the save of the
    newest step has failed, which ranks learn at different times.

    Args:
        step: the step to save
        newest: the newest step of the run that was saved, or restored from its own folder; None: there is none
        how: whether it was `restored` or `saved last`

    Raises:
        CheckpointStepError: the step is before that one
    """
    if newest is None or step >= newest:
        return
    advice = (
        "begin at (manager.restore(state) or 0) + 1"
        if how == "restored"
        else f"steps only increase; to go back, start a run with checkpoint.resume={step} checkpoint.rewind=true"
    )
    raise CheckpointStepError(
        f"Step {step} is not after step {newest}, which this run {how}: {advice} "
        "(docs/failures.md#going-back-to-an-earlier-step)."
    )
