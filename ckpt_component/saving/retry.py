"""Retries of failed saves: which errors are retried, and after how many failures to give up.

With `on_error: retry` all ranks together make several attempts at a save, each from the start: with a new token and
staging folder, all files written again, and a new writer process if the last one died. So fsync is never repeated on a
file for which it failed: the kernel may have dropped the data that it could not write, and would report success. The
snapshot does not change until the last attempt is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from errno import EACCES, EFBIG, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from typing import TypeVar

from ..core.commit.names import token_of_try
from ..core.commit.protocol import Attempt
from ..core.coordination import Coordinator
from ..core.outside import OUTSIDE, Outside
from ..errors import CheckpointError, CheckpointGivenUpError, CheckpointSaveError, CheckpointStallError, RanksError

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")

#: A full or failing disk, a writer process that died, a timeout. Other errors would occur again (a value that cannot be
#: saved, a path that is taken), must not be retried (another run owns the folder), or have already blocked training.
_TRANSIENT = frozenset(
    {"CheckpointSaveError", "CheckpointStorageFullError", "WorkerDiedError", "CheckpointTimeoutError"}
)
#: File system errors that do not go away with time.
_PERMANENT = frozenset({EACCES, EPERM, EROFS, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG, EFBIG})


@dataclass(frozen=True)
class ErrorPolicy:
    """What to do about saves that fail.

    Attributes:
        warn: log a failure and let training continue, instead of raising it at the next call
        attempts: most attempts at one save
        backoff_seconds: the pause before the second attempt; each further pause is twice as long
        max_backoff_seconds: the longest pause
        give_up_after: after this many failed saves in a row the error is raised in any case; None: no limit
        min_free_bytes: free space that a save must leave; None: free space is not checked beforehand
        reason: why training continues after a failure, for the log
    """

    warn: bool = False
    attempts: int = 1
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    give_up_after: int | None = None
    min_free_bytes: int | None = 0
    reason: str = "checkpoint.on_error=warn"

    def pause(self, number: int) -> float:
        """Seconds between attempt `number`, counted from 1, and the next one."""
        return float(min(self.backoff_seconds * 2.0 ** min(number - 1, 64), self.max_backoff_seconds))

    @property
    def pauses(self) -> float:
        """Sum of all pauses of one save, in seconds."""
        return sum(self.pause(number) for number in range(1, self.attempts))


def is_retryable(error: BaseException) -> bool:
    """Whether another attempt may succeed; with several ranks, the error of every failed rank must be retryable."""
    if getattr(error, "errno", None) in _PERMANENT:
        return False
    causes = set(error.causes.values()) if isinstance(error, RanksError) else {type(error).__name__}
    return bool(causes) and causes <= _TRANSIENT


def is_stall(error: BaseException) -> bool:
    """Whether a save was given up, on this rank or on others, so as not to block training."""
    if isinstance(error, RanksError):
        return set(error.causes.values()) == {CheckpointStallError.__name__}
    return isinstance(error, CheckpointStallError)


@dataclass(frozen=True)
class FailedAttempts:
    """All attempts at a save have failed.

    Attributes:
        number: how many there were
        error: why the last one failed
    """

    number: int
    error: BaseException


class RetryLoop:
    """Decides after a failed attempt whether to make another one, and pauses before it.

    Args:
        ranks: coordinator of the ranks
        policy: number of attempts, and pauses between them
        timeout: seconds to wait for the leading rank's decision
    """

    def __init__(self, ranks: Coordinator, policy: ErrorPolicy, timeout: float) -> None:
        self._ranks = ranks
        self._policy = policy
        self._timeout = timeout
        self._closing = ranks.outside.latch()

    def stop_pausing(self) -> None:
        """Skip all further pauses, because `close` waits for the saves."""
        self._closing.set()

    def run(self, first: Attempt, make: Callable[[Attempt, int], _Made]) -> _Made | FailedAttempts:
        """Make attempts at a save until one succeeds, or there must be no other.

        Args:
            first: the first attempt
            make: makes an attempt, given its number from 1

        Returns:
            What `make` returned, or why the last attempt failed; nothing is raised.
        """
        attempt, number = first, 1
        while True:
            try:
                return make(attempt, number)
            except BaseException as error:
                if not self._may_repeat(attempt, number, error):
                    return FailedAttempts(number, error)
            number += 1
            attempt = first.again(token_of_try(first.token, number))

    def _may_repeat(self, attempt: Attempt, number: int, error: BaseException) -> bool:
        """Decide with the other ranks whether to make another attempt, and pause before it."""
        most = self._policy.attempts
        if number >= most or not isinstance(error, Exception) or not self._agree(attempt.token, error):
            return False
        pause = 0.0 if self._closing.is_set else self._policy.pause(number)
        text = "%s: attempt %d of %d failed; retrying in %.1f s (checkpoint.on_error=retry): %s"
        logger.warning(text, attempt.target, number, most, pause, error)
        self._closing.wait(pause)
        return True

    def _agree(self, token: str, error: Exception) -> bool:
        """Get the leading rank's decision, which depends on its own error only."""
        if not self._ranks.is_leader and isinstance(error, RanksError) and error.causes.get(0) == RanksError.__name__:
            return False  # rank 0 is dead and cannot decide
        try:
            deadline = self._ranks.outside.now() + self._timeout
            return bool(self._ranks.run_on_leader(f"{token}/again", lambda: is_retryable(error), deadline))
        except CheckpointError as failure:
            logger.error("could not get rank 0's retry decision, not retrying: %s", failure)
            return False


class ConsecutiveFailures:
    """Counts failed saves in a row. Safe to use from several threads.

    Args:
        limit: `ErrorPolicy.give_up_after`
        outside: what they run in

    Attributes:
        count: number of failures since the last committed save
    """

    def __init__(self, limit: int | None, outside: Outside = OUTSIDE) -> None:
        self._limit = limit
        self._lock = outside.lock()
        self.count = 0

    def reset(self) -> None:
        """Reset the count, after a committed save."""
        with self._lock:
            self.count = 0

    def add(self, error: BaseException) -> CheckpointGivenUpError | None:
        """Count a failed save. Returns the error that must be raised whatever the policy says, or None."""
        with self._lock:
            self.count = count = self.count + 1
        if self._limit is None or count < self._limit:
            return None
        row = "1 save" if count == 1 else f"{count} saves in a row"
        given_up = CheckpointGivenUpError(
            f"{row} failed (checkpoint.give_up_after={self._limit}), the last one with: {error}",
            error.errno if isinstance(error, CheckpointSaveError) else None,
        )
        given_up.__cause__ = error
        return given_up
