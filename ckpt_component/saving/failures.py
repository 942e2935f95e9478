"""What becomes of a save that failed: which errors are worth another try, and when enough is enough."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass

from ..errors import CheckpointGivenUpError, CheckpointSaveError, CheckpointStallError, RanksError

#: A full or failing disk, a writer process that died, a wait that took too long. What is not here fails the same way
#: again (a value that cannot be saved, a path that is taken), must not be tried (another run owns the folder), or has
#: kept training waiting already.
_PASSING = frozenset({"CheckpointSaveError", "CheckpointStorageFullError", "WorkerDiedError", "CheckpointTimeoutError"})
#: Errors of the file system that no pause makes go away.
_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EFBIG,
    }
)


@dataclass(frozen=True)
class ErrorPolicy:
    """What to do about saves that fail.

    Attributes:
        warn: log a failure and let training go on, instead of raising it at the next call.
        attempts: how often one save is tried in all.
        backoff_seconds: the pause before the second try; every further one is twice as long.
        max_backoff_seconds: the longest pause.
        give_up_after: that many failed saves in a row are raised in any case; None: `warn` goes on for ever.
        min_free_bytes: what has to stay free beside a checkpoint; None: nobody looks beforehand.
    """

    warn: bool = False
    attempts: int = 1
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    give_up_after: int | None = None
    min_free_bytes: int | None = 0

    def pause(self, number: int) -> float:
        """Seconds between the n-th try, from 1, and the next one."""
        return float(min(self.backoff_seconds * 2.0 ** min(number - 1, 64), self.max_backoff_seconds))

    @property
    def pauses(self) -> float:
        """All pauses of one save together, in seconds."""
        return sum(self.pause(number) for number in range(1, self.attempts))


def worth_another_try(error: BaseException) -> bool:
    """Whether the same snapshot may be written next time; with several ranks each failed one's error must be so."""
    if getattr(error, "errno", None) in _LASTING:
        return False
    if isinstance(error, RanksError):
        return bool(error.causes) and all(cause in _PASSING for cause in error.causes.values())
    return type(error).__name__ in _PASSING


def is_stall(error: BaseException) -> bool:
    """Whether a save was given up so that training need not wait, on this rank or on others."""
    if isinstance(error, RanksError):
        return bool(error.causes) and set(error.causes.values()) == {CheckpointStallError.__name__}
    return isinstance(error, CheckpointStallError)


class FailureCount:
    """Counts failed saves in a row. Safe to use from several threads.

    Args:
        limit: `ErrorPolicy.give_up_after`.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._failed = 0
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        """A save was committed."""
        with self._lock:
            self._failed = 0

    def failed(self, error: BaseException) -> CheckpointGivenUpError | None:
        """A save failed. Returns the error that has to be raised whatever the policy says, or None."""
        with self._lock:
            self._failed += 1
            count = self._failed
        if self._limit is None or count < self._limit:
            return None
        row = "1 save" if count == 1 else f"{count} saves in a row"
        given_up = CheckpointGivenUpError(
            f"{row} failed (checkpoint.give_up_after={self._limit}), the last one so: {error}",
            error.errno if isinstance(error, CheckpointSaveError) else None,
        )
        given_up.__cause__ = error
        return given_up
