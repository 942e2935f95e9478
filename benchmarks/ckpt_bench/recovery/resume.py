"""The interface of a way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from .trained_model import TrainedModel


class Resumed(NamedTuple):
    """What a trainer found.

    Attributes:
        step: the step after which it goes on; None: from scratch
        source: where its bytes came from, if that is known
        phases: seconds of `find`, `verify` and `copy`; what else there was is `agree`
    """

    step: int | None
    source: str | None
    phases: Mapping[str, float]


class Resume(ABC):
    """One way to save a model and to get it back.

    Args:
        model: what is trained
        folder: of the run
        every_steps: how often a durable checkpoint is saved
        is_whole: False: save one number instead of the model
        overrides: of the config of checkpoints
    """

    @abstractmethod
    def __init__(
        self, model: TrainedModel, folder: str, every_steps: int, *, is_whole: bool, overrides: list[str]
    ) -> None: ...

    @abstractmethod
    def restore(self) -> Resumed:
        """Load the newest checkpoint, if there is one."""

    @abstractmethod
    def step_ended(self, step: int) -> None:
        """Called after each step; saves when it is time to, and returns when what is durable is committed."""

    @abstractmethod
    def close(self) -> None:
        """End processes and threads."""
