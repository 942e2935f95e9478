"""Collects the events of a run, and gives them to the event file and to listeners on a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import CheckpointTypeError
from ..storage.names import new_token
from .event_file import EventFile
from .event_thread import EventThread
from .listener import CheckpointListener
from .records import LoadReport, SaveReport
from .step_times import StepTimes

logger = logging.getLogger(__name__)

_METHODS = [name for name in vars(CheckpointListener) if name.startswith("on_")]


class EventRecorder:
    """The events of one rank of a run.

    Args:
        file: where they are recorded; None: nowhere.
        listeners: told of them too; closed by the recorder.
        rank: this rank.
        world_size: number of ranks.
        run: token of the run, the same on all ranks; None: a new one.
        about: what else the record of the run says, such as versions.
        waits: whether nothing is recorded before the first save, because the run may only restore, from a folder that
            is not its own. Then that save records what came before it.
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
    ) -> None:
        self._file = file
        self._rank = rank
        self._listeners: list[CheckpointListener] = []
        self._failed: list[CheckpointListener] = []
        #: Token of the run.
        self.run = run or new_token()
        self._names = {"run": self.run, "rank": rank}
        self._waits = waits
        #: Events that are not written yet. That of the run is written with the next: without others there is no file.
        self._held: list[Mapping[str, Any]] = [
            {
                "event": "run",
                "time": round(time.time(), 6),
                "world_size": world_size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                **(about or {}),
            }
        ]
        self._steps = StepTimes()
        #: Called after each step by the training thread.
        self.step_ended = self._steps.ended
        self._thread = EventThread()
        for listener in listeners:
            self.add_listener(listener)

    def add_listener(self, listener: CheckpointListener) -> None:
        """Tell a listener of all further events; see `CheckpointListener`.

        Raises:
            CheckpointTypeError: it has none of the methods.
        """
        if not any(hasattr(listener, method) for method in _METHODS):
            raise CheckpointTypeError(
                f"{listener!r} is no listener: it has none of {', '.join(_METHODS)}; derive from CheckpointListener."
            )
        if self._rank == 0 or getattr(listener, "every_rank", True):
            self._listeners.append(listener)

    def progressed(self, report: SaveReport) -> None:
        """A save was `staged` or `written`; only listeners are told."""
        if self._listeners:
            self._thread.submit(partial(self._tell, f"on_{report.outcome}", report))

    def with_loss(self, report: SaveReport) -> SaveReport:
        """The report of a committed save with `lost_s`. Takes the steps so far; `saved` comes next."""
        self._record_steps()
        return replace(report, lost_s=self._steps.lost(report.time, report.stall_s, report.time + report.committed_s))

    def saved(self, report: SaveReport) -> None:
        """A save has ended: it was committed, failed, or was skipped."""
        self._record_steps()
        self.note(report.event())
        if self._listeners:
            method = "on_committed" if report.outcome == "committed" else "on_failed"
            self._thread.submit(partial(self._tell, method, report))

    def loaded(self, report: LoadReport) -> None:
        """A load has ended; only the event file is told."""
        self.note(report.event())

    def restored(self, report: LoadReport) -> None:
        """What was loaded is used: a restore has ended on all ranks, or a load path by path."""
        if self._listeners:
            self._thread.submit(partial(self._tell, "on_restored", report))

    def note(self, event: Mapping[str, Any]) -> None:
        """Record an event."""
        if self._file is not None:
            self._thread.submit(partial(self._write, [event]))

    def drain(self, timeout: float) -> None:
        """Wait until the events so far are recorded and the listeners know them, or for `timeout` seconds."""
        self._thread.drain(timeout)

    def close(self, timeout: float) -> None:
        """Record the last steps, and close the listeners; bounded as `drain`. Safe to call twice."""
        self._record_steps()
        if self._listeners:
            self._thread.submit(partial(self._tell, "close"))
        self._thread.close(timeout)

    def _record_steps(self) -> None:
        events = self._steps.take()
        if self._file is not None and events:
            self._thread.submit(partial(self._write, events))

    def _write(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._held += events
        self._waits = self._waits and not any(event["event"] == "save" for event in events)
        if self._file is not None and not self._waits:
            events, self._held = self._held, []
            self._file.append([{**event, **self._names} for event in events])

    def _tell(self, method: str, *reports: SaveReport | LoadReport) -> None:
        for listener in list(self._listeners):
            self._call(listener, method, *reports)

    def _call(self, listener: CheckpointListener, method: str, *reports: SaveReport | LoadReport) -> None:
        hook = getattr(listener, method, None)
        if hook is None:
            return
        try:
            hook(*reports)
        except Exception:
            if not any(listener is each for each in self._failed):
                self._failed.append(listener)
                text = "%s failed in %s; it is still told of later events, and its further errors are not logged"
                logger.exception(text, listener, method)
