"""`on_error: retry`: one save is tried several times, by all ranks together, each time from nothing.

A try is a whole attempt: a token and a staging folder of its own, every file written anew, a new writer process where
the last one died. So no fsync is ever repeated on a file for which it failed: the kernel may have dropped what it could
not write, and would report success. The snapshot stays as it is until the last try is over.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from ..coordination import Coordinator
from ..errors import CheckpointError, RanksError
from ..storage.names import token_of_try
from .failures import ErrorPolicy, worth_another_try
from .report import SaveReport
from .transaction import AttemptRunner, Scheduled

logger = logging.getLogger(__name__)


class Tries:
    """Takes scheduled saves to their end, with as many attempts as the policy allows.

    Args:
        runner: makes one attempt.
        ranks: how the ranks agree.
        policy: how often, and after which pauses.
        patience: seconds to wait for the leading rank to decide on another try.
    """

    def __init__(self, runner: AttemptRunner, ranks: Coordinator, policy: ErrorPolicy, patience: float) -> None:
        self._runner = runner
        self._ranks = ranks
        self._policy = policy
        self._patience = patience
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Make no pauses any more: somebody waits for the end."""
        self._hurry.set()

    def run(self, scheduled: Scheduled) -> SaveReport:
        """Write and commit; returns when the checkpoint is committed, on all ranks.

        Raises:
            CheckpointError: the last attempt's; with several ranks the same on all of them.
        """
        first = scheduled.attempt
        number = 1
        while True:
            attempt = replace(first, token=token_of_try(first.token, number))
            try:
                report = self._runner.run(replace(scheduled, attempt=attempt))
                return replace(report, attempts=number)
            except Exception as error:
                if number >= self._policy.attempts or not self._all_try_again(attempt.token, error):
                    raise
                pause = 0.0 if self._hurry.is_set() else self._policy.pause(number)
                logger.warning(
                    "%s: attempt %d of %d failed; the next one comes in %.1f s (checkpoint.on_error=retry): %s",
                    first.target,
                    number,
                    self._policy.attempts,
                    pause,
                    error,
                )
            self._hurry.wait(pause)
            number += 1

    def _all_try_again(self, token: str, error: Exception) -> bool:
        """The leading rank's decision, which all learn: its error is the one that counts."""
        if not self._ranks.leads and isinstance(error, RanksError) and error.causes.get(0) == RanksError.__name__:
            return False  # rank 0 is gone, so nobody would answer
        try:
            deadline = time.monotonic() + self._patience
            return bool(self._ranks.lead(f"{token}/again", lambda: worth_another_try(error), deadline))
        except CheckpointError as silence:
            logger.error("this rank cannot learn whether the save is tried again: %s", silence)
            return False
