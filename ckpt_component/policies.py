"""When to save, what to keep, where to resume: three small rules, each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config.errors import CheckpointConfigError
from .errors import CheckpointNotFoundError


@dataclass(frozen=True)
class SavePolicy:
    """Save every so many steps, or after so many seconds, and at the end.

    Attributes:
        every_steps: save when the step is a multiple; None: never for this reason.
        every_seconds: save when the last save is so long ago; None: never for this reason.
        at_end: save the last step when the manager is left without an exception.
    """

    every_steps: int | None = 100
    every_seconds: float | None = None
    at_end: bool = True

    @property
    def ever(self) -> bool:
        """Whether it saves at all, unasked."""
        return self.at_end or self.every_steps is not None or self.every_seconds is not None

    def due(self, step: int, seconds_since_last: float) -> bool:
        """Whether to save at this step."""
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_seconds is not None and seconds_since_last >= self.every_seconds


@dataclass(frozen=True)
class KeepPolicy:
    """Keep the newest checkpoints, and some for ever.

    Attributes:
        last: how many of the newest; None: all.
        every_steps: those whose step is a multiple stay for ever; None: none does.
    """

    last: int | None = 3
    every_steps: int | None = None

    def victims(self, committed: Sequence[int]) -> list[int]:
        """Which of the committed steps may go; never the newest."""
        if self.last is None:
            return []
        old = sorted(committed)[: -max(self.last, 1)]
        return [step for step in old if self.every_steps is None or step % self.every_steps]


@dataclass(frozen=True)
class ResumePolicy:
    """Where a run begins: `auto` (newest, or from scratch), `must` (newest), `never`, or a step."""

    choice: str | int = "auto"

    @classmethod
    def parse(cls, value: str | int) -> ResumePolicy:
        """The policy of `checkpoint.resume`.

        Raises:
            CheckpointConfigError: any other text.
        """
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise CheckpointConfigError(f"checkpoint.resume={value} is no step; use auto, must, never, or a step.")
        if isinstance(value, str) and value not in ("auto", "must", "never"):
            raise CheckpointConfigError(f"checkpoint.resume={value} is unknown; use auto, must, never, or a step.")
        return cls(value)

    def candidates(self, committed: Sequence[int], root: str) -> list[int]:
        """Steps to try, best first; empty: start from scratch.

        Raises:
            CheckpointNotFoundError: `must` and there is none, or the step that was asked for is not there.
        """
        if self.choice == "never":
            return []
        if isinstance(self.choice, int):
            if self.choice not in committed:
                known = f"there are {', '.join(map(str, committed))}" if committed else "there is none at all"
                raise CheckpointNotFoundError(
                    f"checkpoint.resume={self.choice}, but {root} has no such checkpoint; {known}."
                )
            return [self.choice]
        if self.choice == "must" and not committed:
            raise CheckpointNotFoundError(
                f"checkpoint.resume=must, but {root} has no committed checkpoint; "
                "use resume=auto to start from scratch."
            )
        return sorted(committed, reverse=True)
