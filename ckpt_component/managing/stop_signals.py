"""Stop signals: caught when they arrive, and handled by all ranks after the same training step."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..core.coordination import Coordinator
from ..core.processes.running import OwnerProcess
from ..errors import CheckpointConfigError, CheckpointError, CheckpointTypeError

logger = logging.getLogger(__name__)

#: Signals that are caught if none are named. Slurm's --signal=USR1 is the usual early warning; submitit sends SIGUSR2.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
#: Exit code of a process that was warned, for example by SIGUSR1, has saved, and is to be queued again.
REQUEUE_EXIT_CODE = 85
#: Signals that end the job; whoever sends one decides whether it starts again. From weak to strong.
_ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
#: Logged before the last save, whose end the scheduler may not wait for.
LAST_SAVE = "%s: saving step %d; until it is committed, the newest checkpoint is %s"
#: The ranks exchange what they have caught about this often, and at least once in this many steps.
_SECONDS_BETWEEN, _MOST_STEPS_BETWEEN = 1.0, 100


class StopSignals:
    """Catches stop signals until it is closed. A SIGINT after another signal ends the process at once.

    A signal reaches the ranks at different times, or only one of them. So about once a second the ranks exchange what
    they have caught. The leading rank decides for all of them after how many steps they do so again.

    Args:
        ranks: coordinator of the ranks, which stop together
        timeout: seconds to wait for the other ranks
        signals: which signals to catch
        requeue_exit_code: exit code after a warning
        owns_ranks: whether `close` closes the coordinator too
    """

    def __init__(
        self,
        ranks: Coordinator,
        timeout: float,
        signals: Sequence[signal.Signals],
        requeue_exit_code: int,
        *,
        owns_ranks: bool,
    ) -> None:
        self._owner = OwnerProcess("handler")
        self._timeout = timeout
        self._ranks = ranks
        self._now = ranks.outside.now
        self._owns_ranks = owns_ranks
        self._requeue_exit_code = requeue_exit_code
        self._received: list[int] = []
        self._agreed: signal.Signals | None = None
        self._steps, self._steps_left, self._asked_at = 1, 1, self._now()
        self._handlers: dict[int, Any] = {}
        for number in signals:
            try:
                self._handlers[number] = signal.signal(number, self._note)
            except ValueError:  # only the main thread may
                logger.warning("training runs outside the main thread, so a SIGTERM will end it without a save")
                return

    @property
    def caught(self) -> signal.Signals | None:
        """The signal that this rank caught, or None; of several, a warning counts more than the end."""
        return signal.Signals(max(self._received, key=_weight)) if self._received else None

    def agreed(self) -> signal.Signals | None:
        """Return the signal by which all ranks stop now, or None. All ranks must call this after the same steps.

        Raises:
            CheckpointTimeoutError: a rank did not call in time
            RanksError: a rank is dead, or has continued without the call
        """
        if self._ranks.world_size == 1:
            self._agreed = self.caught
            return self._agreed
        self._steps_left -= 1
        if self._agreed is None and self._steps_left <= 0:
            deadline = self._now() + self._timeout
            number, self._steps = self._ranks.meet("should_stop", self.caught or 0, self._decide, deadline)
            self._agreed = signal.Signals(number) if number else None
            self._steps_left, self._asked_at = self._steps, self._now()
        return self._agreed

    def exit(self) -> None:
        """End the process if the ranks have agreed to stop; see `CheckpointManager.exit_if_stopped`. After `close`."""
        if self._agreed is None:
            return
        number = signal.Signals(max(self._agreed, self.caught or 0, key=_weight))  # a warning may have come since
        ends = number in _ENDING
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(number)
            if not ends:  # one process queues the job again, and an error code of another could end that one first
                sys.exit(0)
        sys.exit(128 + number if ends else self._requeue_exit_code)

    def close(self) -> None:
        """Restore the previous signal handlers. Safe to call twice."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._owns_ranks:
            self._ranks.close()

    def _decide(self, caught: list[int]) -> list[int]:
        """On the leading rank: the signal to stop by, or 0, and after how many steps to ask again."""
        seconds_per_step = max(self._now() - self._asked_at, 1e-6) / self._steps
        return [max(caught, key=_weight), max(1, min(int(_SECONDS_BETWEEN / seconds_per_step), _MOST_STEPS_BETWEEN))]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._owner.is_here:
            # A forked child, such as a worker that its pool terminates, does what it would do without this handler.
            signal.signal(number, self._handlers.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        # Another signal can arrive at any point of this method and run it from its start: only the append may count.
        self._received.append(number)
        first = self._received[0] == number and self._received.count(number) == 1
        if number == signal.SIGINT and not first:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if first:
            # Not by logging or print, which the signal may have interrupted in the middle of a line.
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())


class StoppableLoop:
    """What a manager offers to a loop that signals may end.

    Args:
        home: the process of the loop
        ranks: coordinator of the ranks, which stop together; or returns one, for the signals alone
        timeout: seconds to wait for the other ranks

    Attributes:
        stopped_by: the signal by which `should_stop` ends the loop, or None
    """

    def __init__(self, owner: OwnerProcess, ranks: Coordinator | Callable[[], Coordinator], timeout: float) -> None:
        self._owner = owner
        self._stopping = ranks
        self._stop_timeout = timeout
        self._signals: StopSignals | None = None
        self.stopped_by: signal.Signals | None = None

    def stop_on_signal(self, *signals: signal.Signals, requeue_exit_code: int = REQUEUE_EXIT_CODE) -> None:
        """Until `close`, catch signals for `should_stop`, instead of being ended by them.

        Call this on every rank, in the main thread. A SIGINT after another signal ends the process at once.

        Args:
            *signals: which to catch; none named: SIGTERM, SIGINT, SIGUSR1 and SIGUSR2
            requeue_exit_code: see `exit_if_stopped`
        """
        self._owner.check(may_be_closed=True)
        numbers = checked_signals(signals, requeue_exit_code)
        if self._signals is not None or self._owner.closed:
            return
        own = not isinstance(self._stopping, Coordinator)
        ranks = self._stopping() if callable(self._stopping) else self._stopping
        self._signals = StopSignals(ranks, self._stop_timeout, numbers, requeue_exit_code, owns_ranks=own)

    def should_stop(self) -> bool:
        """Whether a signal asks to stop; the same on all ranks. Call this once after every step.

        If True, leave the loop: the end of the `with` block then saves the last step passed to `maybe_save`, whatever
        `save.at_end` says, within `timeouts`. It takes about a second and a step to react to a signal.

        Raises:
            CheckpointError: `stop_on_signal` was not called
            CheckpointTimeoutError: a rank did not call in time
            RanksError: a rank is dead, or has continued without the call
        """
        self._owner.check(may_be_closed=True)
        if self._signals is None:
            raise CheckpointError("Call stop_on_signal() before the loop; should_stop() reports what it notes.")
        self.stopped_by = self._signals.agreed()
        return self.stopped_by is not None

    def exit_if_stopped(self) -> None:
        """After the `with` block: if a signal ended the loop, end the process with an exit code for its scheduler.

        After SIGTERM, SIGINT, SIGHUP and SIGQUIT it is 128 + the signal, after any other, which is a warning, it is
        `requeue_exit_code`. A handler that the signal had before is called first; that of submitit requeues the job.

        Raises:
            SystemExit: a signal ended the loop
            CheckpointError: the manager is not closed yet, so the last step is not saved
        """
        if not self._owner.is_here:
            return
        if not self._owner.closed:
            raise CheckpointError("Call exit_if_stopped() after the manager's with block, which saves the last step.")
        if self._signals is not None:
            self._signals.exit()

    def stop_catching(self) -> None:
        """Restore the previous signal handlers; `close` calls this."""
        if self._signals is not None:
            self._signals.close()


def checked_signals(signals: Sequence[Any], requeue_exit_code: Any) -> Sequence[signal.Signals]:
    """The signals to catch: those given, or else `STOPPING`.

    Raises:
        CheckpointTypeError: something that is not a signal, or one that cannot be caught
        CheckpointConfigError: the exit code means success, or is not one
    """
    if not isinstance(requeue_exit_code, int) or not 1 <= requeue_exit_code <= 255:
        raise CheckpointConfigError(
            f"requeue_exit_code must be an exit code from 1 to 255, got {requeue_exit_code!r}; 0 means success."
        )
    try:
        numbers = [signal.Signals(each) for each in signals]
    except ValueError:
        raise CheckpointTypeError(
            f"stop_on_signal() takes signals such as signal.SIGUSR1, got {', '.join(map(repr, signals))}."
        ) from None
    for number in {signal.SIGKILL, signal.SIGSTOP}.intersection(numbers):
        raise CheckpointTypeError(f"{number.name} cannot be caught; name one that can, such as signal.SIGTERM.")
    return numbers or STOPPING


def _weight(number: int) -> int:
    """Which of several signals counts: a warning more than the end that may follow at once, 0 (none) the least."""
    if number in _ENDING:
        return 1 + _ENDING.index(signal.Signals(number))
    return number and len(_ENDING) + number
