"""SIGTERM, SIGINT and SIGUSR1 as a flag that the loop looks at between two steps, the same on all ranks."""

from __future__ import annotations

import datetime
import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from .ranks import ALONE, Ranks

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


class AgreedStop:
    """The signal by which all ranks stop, after the same step; a context manager.

    A signal reaches the ranks at different moments, and perhaps one of them alone. So after every step they exchange
    what they have caught, over gloo and on the CPU, and look at the answer after the next step, when it is there
    already: no step waits for it, and no device.

    Args:
        signals: what this rank has caught.
        ranks: who takes part; they have joined.
        timeout: seconds after which a rank that does not answer is an error.
    """

    def __init__(self, signals: StopSignals, ranks: Ranks = ALONE, timeout: float = 600.0) -> None:
        self._signals = signals
        self._group: Any = None
        self._asked: tuple[torch.Tensor, Any] | None = None
        if ranks.world_size > 1:
            limit = datetime.timedelta(seconds=timeout)
            self._group = torch.distributed.new_group(backend="gloo", timeout=limit)

    def after_step(self) -> signal.Signals | None:
        """The signal to stop by, or None; all ranks must call it after the same steps.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._group is None:
            return self._signals.caught
        answer = self._answer()
        if answer is None:
            flag = torch.tensor([self._signals.caught or 0])
            highest = torch.distributed.ReduceOp.MAX
            self._asked = flag, torch.distributed.all_reduce(flag, highest, group=self._group, async_op=True)
        return answer

    def _answer(self) -> signal.Signals | None:
        if self._asked is None:
            return None
        flag, work = self._asked
        self._asked = None
        work.wait()
        return signal.Signals(int(flag)) if int(flag) else None

    def __enter__(self) -> AgreedStop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._group is None:
            return  # with a rank gone, nobody answers
        self._answer()
        torch.distributed.destroy_process_group(self._group)
        self._group = None
