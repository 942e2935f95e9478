"""`PerRank` marks values that differ from rank to rank, such as RNG states: each rank saves and loads its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...errors import CheckpointConfigError

WhenResized = Literal["keep", "first", "error"]


@dataclass
class PerRank:
    """A value of a state dict that differs from rank to rank. All other values must be equal on ranks with equal keys.

    Of those only one rank's value is saved; a save that finds a difference logs a warning with the key.

    Args:
        value: a plain value, a tensor, nested containers, or an object with `state_dict()` and `load_state_dict()`. A
            load updates it in place, or replaces it if it is a plain value.
        when_resized: what a load does if the checkpoint was saved with another number of ranks: `keep` keeps the
            current value, `first` loads that of rank 0, `error` raises

    Raises:
        CheckpointConfigError: `when_resized` is none of these three
    """

    value: Any
    when_resized: WhenResized = "error"

    def __post_init__(self) -> None:
        if self.when_resized not in get_args(WhenResized):
            raise CheckpointConfigError(
                f"PerRank(when_resized={self.when_resized!r}) is unknown; use 'keep', 'first' or 'error'."
            )


def rank_name(rank: int) -> str:
    """The key of a rank's own value: `rank_00003`."""
    return f"rank_{rank:05d}"


def rank_of(name: object) -> int | None:
    """The inverse of `rank_name`; None for any other name."""
    if isinstance(name, str) and name.startswith("rank_") and name[5:].isdigit():
        return int(name[5:])
    return None
