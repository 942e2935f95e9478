"""Stop signals: caught when they arrive, and handled by all ranks after the same training step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from ..coordination import Coordinator

logger = logging.getLogger(__name__)

#: Signals by which a scheduler or a user stops a job; Slurm's --signal=USR1 is the usual early warning.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: The ranks exchange what they have caught about this often, and at least once in this many steps.
_SECONDS_BETWEEN, _MOST_STEPS_BETWEEN = 1.0, 100


class StopSignals:
    """Catches stop signals until it is closed. A SIGINT after another signal ends the process at once.

    A signal reaches the ranks at different times, or only one of them. So about once a second the ranks exchange what
    they have caught. The leading rank decides for all of them after how many steps they do so again.

    Args:
        ranks: coordinator of the ranks, which stop together.
        timeout: seconds to wait for the other ranks.
        owns_ranks: whether `close` closes the coordinator too.
    """

    def __init__(self, ranks: Coordinator, timeout: float, *, owns_ranks: bool = False) -> None:
        self._timeout = timeout
        self._ranks = ranks
        self._owns_ranks = owns_ranks
        self._caught: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self._steps, self._steps_left, self._asked_at = 1, 1, time.monotonic()
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            logger.warning("training runs outside the main thread, so a SIGTERM will end it without a save")
            return
        for number in STOPPING:
            self._handlers[number] = signal.signal(number, self._note)

    def agreed(self) -> signal.Signals | None:
        """Return the signal by which all ranks stop now, or None. All ranks must call this after the same steps.

        Raises:
            CheckpointTimeoutError: a rank did not call in time.
            RanksError: a rank is dead, or has continued without the call.
        """
        if self._ranks.world_size == 1:
            return self._caught
        self._steps_left -= 1
        if self._agreed is None and self._steps_left <= 0:
            deadline = time.monotonic() + self._timeout
            number, self._steps = self._ranks.meet("should_stop", self._caught or 0, self._decide, deadline)
            self._agreed = signal.Signals(number) if number else None
            self._steps_left, self._asked_at = self._steps, time.monotonic()
        return self._agreed

    def close(self) -> None:
        """Restore the previous signal handlers. Safe to call twice."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._owns_ranks:
            self._ranks.close()

    def _decide(self, caught: list[int]) -> list[int]:
        """On the leading rank: the signal to stop by, or 0, and after how many steps to ask again."""
        seconds_per_step = max(time.monotonic() - self._asked_at, 1e-6) / self._steps
        return [max(caught), max(1, min(int(_SECONDS_BETWEEN / seconds_per_step), _MOST_STEPS_BETWEEN))]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._caught is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self._caught is None:
            self._caught = signal.Signals(number)
            # Not by logging or print, which the signal may have interrupted in the middle of a line.
            os.write(2, f"{self._caught.name}: stopping after this step\n".encode())
