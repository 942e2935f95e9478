"""The beginning of a save: all ranks agree that it takes place, before anything is copied.

It is the one moment at which training waits for other ranks: each says where it wants to save, whether its state has
changed its structure, and what went wrong; rank 0 looks whether the path is free and gives the attempt its token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .coordination import Coordinator
from .errors import CheckpointSaveError, RanksError
from .storage.commit import refuse_existing
from .storage.names import new_token


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on.

    Attributes:
        number: of the save, from 1; alike on all ranks.
        token: names the attempt.
        replan: a rank's state has another structure than before.
        untold: instead of all that: the number of an earlier save that failed, and why. All ranks raise that first.
    """

    number: int
    token: str = ""
    replan: bool = False
    untold: tuple[int, str] | None = None


class Schedule:
    """Numbers the saves of a checkpointer.

    Args:
        ranks: who has to agree.
        timeout: seconds to wait for all of them.
    """

    def __init__(self, ranks: Coordinator, timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._number = 0

    def agree(self, path: str, *, changed: bool, error: Exception | None, untold: Mapping[int, str]) -> Agreement:
        """Agree on the next save.

        Args:
            path: where to, absolute.
            changed: this rank's state has to be planned anew.
            error: why this rank cannot take part.
            untold: earlier saves whose failure this rank's caller has not been told, by number.

        Raises:
            CheckpointExistsError: the path is taken.
            RanksError: a rank cannot take part; with one rank its own error instead.
            CheckpointTimeoutError: a rank did not come.
        """
        self._number += 1
        if error is not None and self._ranks.world_size == 1:
            raise error
        said = {
            "path": path,
            "changed": changed,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "untold": {str(number): text for number, text in untold.items()},
        }
        deadline = time.monotonic() + self._timeout
        try:
            agreed = self._ranks.pool(f"save/{self._number}", said, _decide, deadline)
        except RanksError as failure:
            raise failure from error
        told = agreed.get("untold")
        return Agreement(self._number, agreed["token"], agreed["replan"], None if told is None else (told[0], told[1]))


def _decide(said: list[dict[str, Any]]) -> dict[str, Any]:
    """On the leading rank: what becomes of a save, from what every rank says."""
    errors = {rank: each["error"] for rank, each in enumerate(said) if each["error"] is not None}
    if errors:
        named = " | ".join(f"rank {rank}: {text}" for rank, text in list(errors.items())[:8])
        raise RanksError(f"Nothing was saved, because {len(errors)} of {len(said)} ranks failed. {named}", None, errors)
    paths = sorted({each["path"] for each in said})
    if len(paths) > 1:
        raise CheckpointSaveError(f"The ranks must save to one path, and they named {paths[0]} and {paths[1]}.")
    untold = {int(number): text for each in said for number, text in each["untold"].items()}
    if untold:
        first = min(untold)
        return {"token": "", "replan": False, "untold": [first, untold[first]]}
    refuse_existing(paths[0])
    return {"token": new_token(), "replan": any(each["changed"] for each in said)}
