"""SIGTERM, SIGINT and SIGUSR1 as a flag that the loop looks at between two steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

#: What a scheduler or a person asks a job to stop with; Slurm's --signal=USR1 is the usual early warning.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """While its `with` block runs, a stop signal is only noted. A SIGINT after it ends the process at once.

    Attributes:
        caught: the signal, or None.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("training runs outside the main thread, so a SIGTERM will end it without a save")
            return self
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.caught is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self.caught is None:
            self.caught = signal.Signals(number)
            # Not by logging or print: those may be half-way through a line of their own when a signal comes.
            os.write(2, f"{self.caught.name}: stopping after this step\n".encode())
