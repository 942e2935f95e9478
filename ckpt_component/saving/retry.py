"""What follows a save that failed: which errors are worth another attempt, and after how many failures to stop.

With `on_error: retry` one save is tried several times, by all ranks together, each time from nothing: a token and a
staging folder of its own, every file written anew, a new writer process where the last one died. So no fsync is ever
repeated on a file for which it failed: the kernel may have dropped what it could not write, and would report success.
The snapshot stays as it is until the last attempt is over.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from errno import EACCES, EFBIG, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS

from ..coordination import Coordinator
from ..errors import CheckpointError, CheckpointGivenUpError, CheckpointSaveError, CheckpointStallError, RanksError
from ..storage.names import token_of_try
from .in_flight import PendingSave

logger = logging.getLogger(__name__)

#: A full or failing disk, a writer process that died, a wait that took too long. Other errors fail the same way again
#: (a value that cannot be saved, a path that is taken), must not be retried (another run owns the folder), or have kept
#: training waiting already.
_TRANSIENT = frozenset(
    {"CheckpointSaveError", "CheckpointStorageFullError", "WorkerDiedError", "CheckpointTimeoutError"}
)
#: Errors of the file system that do not go away with time.
_PERMANENT = frozenset({EACCES, EPERM, EROFS, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG, EFBIG})


@dataclass(frozen=True)
class ErrorPolicy:
    """What to do about saves that fail.

    Attributes:
        warn: log a failure and let training go on, instead of raising it at the next call.
        attempts: how often one save is tried in all.
        backoff_seconds: the pause before the second attempt; every further one is twice as long.
        max_backoff_seconds: the longest pause.
        give_up_after: that many failed saves in a row are raised in any case; None: there is no such limit.
        min_free_bytes: what has to stay free beside a checkpoint; None: free space is not checked beforehand.
    """

    warn: bool = False
    attempts: int = 1
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    give_up_after: int | None = None
    min_free_bytes: int | None = 0

    def pause(self, number: int) -> float:
        """Seconds between the n-th attempt, from 1, and the next one."""
        return float(min(self.backoff_seconds * 2.0 ** min(number - 1, 64), self.max_backoff_seconds))

    @property
    def pauses(self) -> float:
        """All pauses of one save together, in seconds."""
        return sum(self.pause(number) for number in range(1, self.attempts))


def is_retryable(error: BaseException) -> bool:
    """Whether the same snapshot may be written next time; with several ranks each failed one's error must be so."""
    if getattr(error, "errno", None) in _PERMANENT:
        return False
    causes = set(error.causes.values()) if isinstance(error, RanksError) else {type(error).__name__}
    return bool(causes) and causes <= _TRANSIENT


def is_stall(error: BaseException) -> bool:
    """Whether a save was given up so that training need not wait, on this rank or on others."""
    if isinstance(error, RanksError):
        return set(error.causes.values()) == {CheckpointStallError.__name__}
    return isinstance(error, CheckpointStallError)


class RetryLoop:
    """Says after a failed attempt whether the save gets another one, and pauses before it.

    Args:
        ranks: how the ranks agree.
        policy: how often, and after which pauses.
        patience: seconds to wait for the leading rank's decision.
    """

    def __init__(self, ranks: Coordinator, policy: ErrorPolicy, patience: float) -> None:
        self._ranks = ranks
        self._policy = policy
        self._patience = patience
        self._closing = threading.Event()

    def stop_pausing(self) -> None:
        """Make no more pauses, because `close` waits for the saves."""
        self._closing.set()

    def prepare_next(self, save: PendingSave, error: BaseException) -> bool:
        """Make a save ready for its next attempt, after the pause. Returns False when there is none."""
        number, most = save.attempts, self._policy.attempts
        if number >= most or not isinstance(error, Exception) or not self._agree(save.attempt.token, error):
            return False
        pause = 0.0 if self._closing.is_set() else self._policy.pause(number)
        text = "%s: attempt %d of %d failed; the next one comes in %.1f s (checkpoint.on_error=retry): %s"
        logger.warning(text, save.path, number, most, pause, error)
        self._closing.wait(pause)
        save.attempts += 1
        save.attempt = replace(save.attempt, token=token_of_try(save.token, save.attempts))
        return True

    def _agree(self, token: str, error: Exception) -> bool:
        """The leading rank's decision, which all learn: its error is the one that counts."""
        if not self._ranks.is_leader and isinstance(error, RanksError) and error.causes.get(0) == RanksError.__name__:
            return False  # rank 0 is dead and decides nothing
        try:
            deadline = time.monotonic() + self._patience
            return bool(self._ranks.run_on_leader(f"{token}/again", lambda: is_retryable(error), deadline))
        except CheckpointError as failure:
            logger.error("could not get rank 0's retry decision, not retrying: %s", failure)
            return False


class ConsecutiveFailures:
    """Counts failed saves in a row. Safe to use from several threads.

    Args:
        limit: `ErrorPolicy.give_up_after`.

    Attributes:
        count: since the last save that was committed.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0

    def reset(self) -> None:
        """A save was committed."""
        with self._lock:
            self.count = 0

    def add(self, error: BaseException) -> CheckpointGivenUpError | None:
        """A save failed. Returns the error that has to be raised whatever the policy says, or None."""
        with self._lock:
            self.count = count = self.count + 1
        if self._limit is None or count < self._limit:
            return None
        row = "1 save" if count == 1 else f"{count} saves in a row"
        given_up = CheckpointGivenUpError(
            f"{row} failed (checkpoint.give_up_after={self._limit}), the last one so: {error}",
            error.errno if isinstance(error, CheckpointSaveError) else None,
        )
        given_up.__cause__ = error
        return given_up
