"""Collects the events of a run, and gives them to the event file and to listeners, each on a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.outside import OUTSIDE, Outside
from ..core.storage.new_names import new_token
from ..core.waits import LongWait
from ..errors import CheckpointError, CheckpointTypeError
from .event_file import EventFile
from .event_queue import EventQueue
from .listener import CheckpointListener
from .listener_calls import ListenerCalls
from .reports import LoadReport, SaveReport
from .step_times import StepTimes

#: So long a listener may take for one event before a warning says that it hangs.
_SLOW_SECONDS = 10.0


class EventRecorder:
    """The events of one rank of a run.

    Args:
        file: where they are recorded; None: nowhere
        listeners: called for them too; closed by the recorder
        rank: this rank
        world_size: number of ranks
        run: token of the run, the same on all ranks; None: a new one
        about: what else the record of the run says, such as versions
        waits: whether nothing is recorded before the first save, because the run may only restore, from a folder that
            is not its own. Then that save records what came before it.
        slow_seconds: how long a listener may take for one event before a warning names it
        outside: what the run runs in
    """

    def __init__(
        self,
        file: EventFile | None = None,
        listeners: Iterable[CheckpointListener] = (),
        *,
        rank: int = 0,
        world_size: int = 1,
        run: str | None = None,
        about: Mapping[str, Any] | None = None,
        waits: bool = False,
        slow_seconds: float = _SLOW_SECONDS,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._file = file
        self._rank = rank
        self._outside = outside
        self._listeners: list[ListenerCalls] = []
        self._slow_seconds = slow_seconds
        #: Token of the run.
        self.run = run or new_token(outside)
        self._names = {"run": self.run, "rank": rank}
        self._waits = waits
        #: Events that are not written yet. That of the run is written with the next: without others there is no file.
        self._held: list[Mapping[str, Any]] = [
            {
                "event": "run",
                "time": round(outside.date(), 6),
                "world_size": world_size,
                "host": outside.host_name(),
                "pid": outside.pid(),
                **(about or {}),
            }
        ]
        self._steps = StepTimes(outside)
        #: Called after each step by the training thread.
        self.step_ended = self._steps.ended
        self._queue = EventQueue("ckpt-events", "the disk of the event file", outside)
        for listener in listeners:
            self.add_listener(listener)
        # Without a file there is nothing to record; the waits of the process would keep a reference to this recorder.
        self._end_of_waits = outside.waits.tell(self._waited) if file is not None else lambda: None

    def add_listener(self, listener: CheckpointListener) -> None:
        """Call a listener for all further events; see `CheckpointListener`.

        Raises:
            CheckpointTypeError: it is none
        """
        if not isinstance(listener, CheckpointListener):
            raise CheckpointTypeError(f"{listener!r} is no listener; its class must derive from CheckpointListener.")
        if self._rank == 0 or listener.every_rank:
            self._listeners.append(ListenerCalls(listener, self._slow_seconds, self._outside))

    @property
    def is_recorded(self) -> bool:
        """Whether there is an event file."""
        return self._file is not None

    @property
    def has_listeners(self) -> bool:
        """Whether `progressed` calls anybody."""
        return bool(self._listeners)

    def progressed(self, report: SaveReport) -> None:
        """A save was `staged` or `written`; only listeners are called."""
        self._tell(f"on_{report.outcome}", report)

    def with_loss(self, report: SaveReport) -> SaveReport:
        """The report of a committed save with `lost_s`. Takes the steps so far; `saved` comes next."""
        self._record(self._steps.take())
        return replace(report, lost_s=self._steps.lost(report.time, report.stall_s, report.time + report.committed_s))

    def saved(self, report: SaveReport) -> None:
        """A save has ended: it was committed, failed, or was skipped."""
        self._record([*self._steps.take(), report.event()])
        self._tell("on_committed" if report.outcome == "committed" else "on_failed", report)

    def at_peers(self, report: SaveReport) -> None:
        """The snapshot of a save, which was told of before, is at its peers."""
        self.note(report.peers_event())
        self._tell("on_at_peers", report)

    def loaded(self, report: LoadReport) -> None:
        """A load has ended; only the event file has it."""
        self.note(report.event())

    def restored(self, report: LoadReport) -> None:
        """What was loaded is used: a restore has ended on all ranks, or a load path by path."""
        self._tell("on_restored", report)

    def _waited(self, wait: LongWait) -> None:
        """This process waits longer than usual, or has ended to."""
        self.note({"event": "wait", "time": round(self._outside.date(), 6), **wait.plain()})

    def note(self, event: Mapping[str, Any]) -> None:
        """Record an event."""
        self._record([event])

    def note_now(self, event: Mapping[str, Any]) -> None:
        """Record an event of work that goes on after the last save, also when this recorder is closed; after `note`."""
        if self._file is not None:
            self._file.append([{**event, **self._names}])

    def drain(self, timeout: float) -> None:
        """Wait until the events so far are recorded and the listeners know them, or for `timeout` seconds."""
        deadline = self._outside.now() + timeout
        for queue in (self._queue, *self._listeners):
            queue.drain(deadline)

    def close(self, timeout: float) -> None:
        """Record the last steps, and close the listeners; bounded as `drain`. Safe to call twice."""
        self._end_of_waits()
        self._record(self._steps.take())
        self._tell("close")
        deadline = self._outside.now() + timeout
        for queue in (self._queue, *self._listeners):
            queue.close(deadline)

    def _record(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None and events:
            with contextlib.suppress(CheckpointError):  # it is closed
                self._queue.post(self._write, self._file, events)

    def _write(self, file: EventFile, events: Iterable[Mapping[str, Any]]) -> None:
        self._held += events
        self._waits = self._waits and not any(event["event"] == "save" for event in events)
        if not self._waits:
            events, self._held = self._held, []
            file.append([{**event, **self._names} for event in events])

    def _tell(self, method: str, *reports: SaveReport | LoadReport) -> None:
        for listener in tuple(self._listeners):
            listener.tell(method, *reports)
