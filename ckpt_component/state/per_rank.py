"""Marks what every rank has of its own, such as random generators: saved and loaded by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import CheckpointConfigError

WhenResized = Literal["keep", "first", "error"]


@dataclass
class PerRank:
    """A value of a state dict that differs from rank to rank. All else is taken to be equal where keys are equal.

    A save that finds a difference warns of it by key: only one rank's value is saved then.

    Args:
        value: a plain value, a tensor, nested containers, or an object with `state_dict()` and `load_state_dict()`. A
            load fills it in place, or replaces it where it is a plain value.
        when_resized: what a load does when the checkpoint was saved by another number of ranks: `keep` leaves what the
            value is now, `first` takes that of rank 0, `error` refuses.

    Raises:
        CheckpointConfigError: another text than these three.
    """

    value: Any
    when_resized: WhenResized = "error"

    def __post_init__(self) -> None:
        if self.when_resized not in get_args(WhenResized):
            raise CheckpointConfigError(
                f"PerRank(when_resized={self.when_resized!r}) is unknown; use 'keep', 'first' or 'error'."
            )


def rank_name(rank: int) -> str:
    """The name under which a rank's own value stands: `rank_00003`."""
    return f"rank_{rank:05d}"


def rank_of(name: object) -> int | None:
    """The inverse of `rank_name`; None for any other name."""
    if isinstance(name, str) and name.startswith("rank_") and name[5:].isdigit():
        return int(name[5:])
    return None
