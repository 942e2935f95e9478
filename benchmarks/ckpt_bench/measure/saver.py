"""The interface of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from .states import State

#: How long a save may take to be staged, or complete.
SECONDS = 600


class Saver(ABC):
    """One way of saving a state, for one process. One save is under way at a time.

    Args:
        state: the tensors that training changes in place

    Attributes:
        written: of a row that writes in the background and has a future for it, that of the last save
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.written: Future[Any] | None = None

    @abstractmethod
    def save(self, path: str) -> None:
        """Save to a new path; the time that this call takes is the stall."""

    def wait_staged(self) -> None:
        """Return when the tensors may be changed."""

    def poll(self) -> bool:
        """Whether the save is complete, asked once per step of training."""
        return self.written is None or self.written.done()

    def finish(self) -> None:
        """Return when the save is complete; raise what went wrong."""
        if self.written is not None:
            self.written.result(SECONDS)

    @abstractmethod
    def load(self, path: str, target: State) -> None:
        """Load into the tensors of `target`."""

    def facts(self, path: str) -> dict[str, object]:
        """Further notes on a checkpoint of this row."""
        return {}

    def close(self) -> None:
        """End processes and threads."""


def copy_into(target: State, loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy loaded tensors into those of `target`, unless they are the same."""
    for key, tensor in target.items():
        if loaded[key] is not tensor:
            tensor.copy_(loaded[key])
