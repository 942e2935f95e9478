"""Faults at the phases of a save, in this process: for tests of this package, of parts, and of training loops.

    from ckpt_component.testing import faults

    with faults.at("write").kills("writer"):
        manager.save(1, state)
        manager.wait()

The phases, in the order of a save. A fault happens before what is named here, except at `write`, `vote` and
`committed`:

    plan       the ranks agree who stores what, and a new structure is laid out
    stage      the snapshot is taken
    copy       the copy beside training begins (`zero_overhead` only)
    send       the request is handed to the caller
    write      the writer process has the request and has not answered; with an inline caller, before the write
    vote       this rank's part is written, and its vote is not sent
    publish    all ranks have voted; rank 0 is about to commit
    committed  the checkpoint is there, and neither the pointer nor the report is
    delete     `keep` is about to delete a checkpoint

Of two faults at one phase the inner block's happens first, but after that of the outer block at `write`, `vote` and
`committed`. A fault replaces functions of the package for the length of its `with` block, so production code has no
trace of it. Faults of single file operations are in `SimulatedFiles`, and for several processes in `CKPT_FAILPOINT`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil

from ..callers import write_callers
from ..callers.write_callers import WriteCaller
from ..core.commit import commit
from ..errors import CheckpointError, CheckpointSaveError
from ..managing import run_folder
from ..saving.attempts import SaveAttempts
from ..saving.planning import SavePlanner
from ..stagers.base import Stager
from ..stagers.zero_overhead import BackgroundCopy

_WRITER = "ckpt_component.core.writing.worker"
#: The longest that a fault holds a save.
_HOLD_SECONDS = 60.0
#: The longest that a process takes to end after SIGKILL.
_END_SECONDS = 10.0


class FaultError(CheckpointError, ValueError):
    """A fault is not possible as it is written, or the save never came to its phase."""


@dataclass(frozen=True)
class _PhaseFunction:
    """A function that is called at a phase.

    Attributes:
        owner: the module or class that has it
        name: its name there
        after: the fault happens after the call
        in_process: the call hands a request to the writer process
    """

    owner: Any
    name: str
    after: bool = False
    in_process: bool = False


def _overridden(base: type, name: str) -> list[_PhaseFunction]:
    """The method in every class that implements it."""
    found, left = list[_PhaseFunction](), [base]
    while left:
        each = left.pop()
        left += each.__subclasses__()
        if name in vars(each) and not getattr(vars(each)[name], "__isabstractmethod__", False):
            found.append(_PhaseFunction(each, name))
    return found


def _places(phase: str) -> list[_PhaseFunction]:
    if phase == "stage":
        return _overridden(Stager, "take")
    if phase == "send":
        return _overridden(WriteCaller, "run")
    return {
        "plan": [_PhaseFunction(SavePlanner, "share")],
        "copy": [_PhaseFunction(BackgroundCopy, "run")],
        "write": [
            _PhaseFunction(write_callers.ConnectedCaller, "_send", after=True, in_process=True),
            _PhaseFunction(write_callers, "run_write_job"),
        ],
        "vote": [_PhaseFunction(SaveAttempts, "_write", after=True)],
        "publish": [_PhaseFunction(commit, "publish")],
        "committed": [_PhaseFunction(commit, "publish", after=True)],
        "delete": [_PhaseFunction(run_folder, "discard")],
    }[phase]


PHASES = ("plan", "stage", "copy", "send", "write", "vote", "publish", "committed", "delete")


@dataclass(frozen=True)
class At:
    """A phase, and which times a save comes to it; see `at`."""

    phase: str
    nth: int
    times: int | None

    def raises(self, *errors: BaseException) -> SaveFault:
        """Raise an error; several are raised one after the other, each once."""
        left = list(errors)
        last = left[-1]
        times = self.times if len(errors) == 1 else len(errors)

        def fail() -> None:
            raise left.pop(0) if left else last

        return SaveFault(At(self.phase, self.nth, times), fail)

    def kills(self, process: str) -> SaveFault:
        """SIGKILL to the `writer` process, or to the `trainer`, which is this process."""
        if process == "trainer":
            return SaveFault(self, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return SaveFault(self, _to_writers(process, signal.SIGKILL), stops=True)

    def stops(self, process: str) -> SaveFault:
        """SIGSTOP to the `writer` process, which continues at `release` or at the end of the block."""
        return SaveFault(self, _to_writers(process, signal.SIGSTOP), stops=True)

    def holds(self, seconds: float = _HOLD_SECONDS) -> SaveFault:
        """Hold the save until `release` or the end of the block; after `seconds` it fails with a FaultError."""
        fault = SaveFault(self, lambda: None)

        def hold() -> None:
            if not fault.released.wait(seconds):
                raise FaultError(f"The save was held at {self.phase!r} for {seconds:g} s; call release() before.")

        fault.action = hold
        return fault

    def calls(self, action: Callable[[], Any]) -> SaveFault:
        """Call a function."""
        return SaveFault(self, action)


def at(phase: str, nth: int = 1, times: int | None = 1) -> At:
    """Choose where a fault happens; a method of what is returned says which fault, for a `with` statement.

    Args:
        phase: one of `PHASES`
        nth: the first time that a save of this process comes there, within the block, is 1
        times: how many times from then on; None: every time

    Raises:
        FaultError: there is no such phase, or no such time
    """
    if phase not in PHASES:
        raise FaultError(f"There is no phase {phase!r}; use one of {', '.join(PHASES)}.")
    if nth < 1 or (times is not None and times < 1):
        raise FaultError(f"nth={nth}, times={times}: the first time is 1.")
    return At(phase, nth, times)


def writers() -> list[int]:
    """The process ids of the writer processes of this process, the oldest first."""
    return [child.pid for child in _children() if _is_writer(child)]


class SaveFault:
    """A fault that happens while its `with` block runs. `at` makes it.

    Args:
        at: where
        action: what happens there
        stops: whether a writer process is stopped before it gets its request, so that it cannot answer first

    Attributes:
        reached: how often a save has come to the phase, within the block
        released: set by `release`
        action: what happens
    """

    def __init__(self, at: At, action: Callable[[], Any], *, stops: bool = False) -> None:
        self.reached = 0
        self.released = threading.Event()
        self.action = action
        self._at = at
        self._stops = stops
        self._lock = threading.Lock()
        self._happened = threading.Event()
        self._inside = threading.local()
        self._replaced: list[tuple[_PhaseFunction, Any]] = []

    def wait(self, seconds: float = _HOLD_SECONDS) -> None:
        """Wait until the fault happens. Raises FaultError if it does not within `seconds`."""
        if not self._happened.wait(seconds):
            raise FaultError(f"No save came to {self._at} within {seconds:g} s.")

    def release(self) -> None:
        """Let what is held or stopped continue."""
        self.released.set()
        if self._stops:
            _signal(writers(), signal.SIGCONT)

    def __enter__(self) -> SaveFault:
        for place in _places(self._at.phase):
            original = vars(place.owner)[place.name]
            self._replaced.append((place, original))
            setattr(place.owner, place.name, self._around(original, place))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()
        while self._replaced:
            place, original = self._replaced.pop()
            setattr(place.owner, place.name, original)
        if error is None and not self._happened.is_set():
            raise FaultError(f"No save came to {self._at}; wait for the save within the block.")

    def _around(self, original: Callable[..., Any], place: _PhaseFunction) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "at", False):  # a method that calls that of its base class
                return original(*args, **kwargs)
            self._inside.at = True
            try:
                if not self._arrive():
                    return original(*args, **kwargs)
                if place.in_process:
                    return self._hand_over(original, *args)
                result = original(*args, **kwargs) if place.after else None
                self._happen()
                return result if place.after else original(*args, **kwargs)
            finally:
                self._inside.at = False

        return run

    def _arrive(self) -> bool:
        """Count, and return whether the fault happens this time."""
        with self._lock:
            self.reached += 1
            return self._at.nth <= self.reached < self._at.nth + (self._at.times or self.reached)

    def _happen(self) -> None:
        self._happened.set()
        self.action()

    def _hand_over(self, send: Callable[..., Any], caller: Any, process: Any, request: Any, *rest: Any) -> None:
        """Hand a request to the writer process, and have the fault before the caller reads the answer."""
        if self._stops:
            os.kill(process.pid, signal.SIGSTOP)
        send(caller, process, request, *rest)
        try:
            self._happen()
        except Exception as error:
            process.receive(rest[-1], "timeouts.write")  # else the next request would get this answer
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                text = f"Writing {request.attempt.target} failed: {error}."
                raise CheckpointSaveError(text, error.errno) from error
            raise


def _to_writers(process: str, number: signal.Signals) -> Callable[[], None]:
    if process != "writer":
        raise FaultError(f"There is no process {process!r} in a save; use writer, or trainer to kill this one.")

    def send() -> None:
        found = writers()
        if not found:
            raise FaultError("There is no writer process; use checkpoint/caller=persistent or temporal.")
        _signal(found, number)
        if number == signal.SIGKILL:
            _wait_for_end(found)

    return send


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_end(pids: list[int]) -> None:
    """A process that was killed still looks alive for a moment, in which the next save would be handed to it."""
    deadline = time.monotonic() + _END_SECONDS
    while any(map(_runs, pids)):
        if time.monotonic() > deadline:
            raise FaultError(f"The writer process was killed and still runs after {_END_SECONDS:g} s.")
        time.sleep(0.001)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _children() -> Iterator[psutil.Process]:
    yield from sorted(psutil.Process().children(), key=lambda child: (child.create_time(), child.pid))


def _is_writer(child: psutil.Process) -> bool:
    try:
        return any(_WRITER in word for word in child.cmdline())
    except psutil.Error:  # it has ended
        return False
