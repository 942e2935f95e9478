"""The interface of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .states import State


class Saver(ABC):
    """One way of saving a state, for one process. One save is under way at a time.

    Args:
        state: the tensors that training changes in place
    """

    def __init__(self, state: State) -> None:
        self.state = state

    @abstractmethod
    def save(self, path: str) -> None:
        """Save to a new path; the time that this call takes is the stall."""

    def wait_staged(self) -> None:
        """Return when the tensors may be changed."""

    def poll(self) -> bool:
        """Whether the save is complete, asked once per step of training."""
        return True

    def finish(self) -> None:
        """Return when the save is complete; raise what went wrong."""

    @abstractmethod
    def load(self, path: str, target: State) -> None:
        """Load into the tensors of `target`."""

    def facts(self, path: str) -> dict[str, object]:
        """Further notes on a checkpoint of this row."""
        return {}

    def close(self) -> None:
        """End processes and threads."""
