"""Collects the events of a run, and gives them to the event file and to listeners, each on its own thread."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.lane import Lane
from ..core.outside import OUTSIDE, Latch, Outside
from ..core.storage.new_names import new_token
from ..core.waits import LongWait
from ..errors import CheckpointError, CheckpointTypeError, describe_error
from .event_file import EventFile
from .listener import CheckpointListener
from .reports import LoadReport, SaveReport

logger = logging.getLogger(__name__)

#: Events that may wait. A save makes three or four.
_WAITING = 1000


class EventQueue(Lane):
    """A lane that says for whom events are dropped, or waited for no longer.

    Args:
        name: of the thread
        what: who takes the events, for a warning
        outside: what it runs in
    """

    failure = "an event could not be recorded"

    def __init__(self, name: str, what: str, outside: Outside) -> None:
        super().__init__(name, outside, may_lose=_WAITING, jobs=what)
        self._whom = what
        self._full = False

    def _dropped(self) -> None:
        if not self._full:
            logger.warning("%d events are waiting for %s; newer ones are dropped", _WAITING, self._whom)
        self._full = True

    def _given_up(self) -> None:
        logger.warning("not waiting any longer for %s (checkpoint.timeouts.close)", self._whom)


class ListenerCalls(EventQueue):
    """Calls one listener, and warns when it fails, and while it hangs.

    Args:
        listener: the listener
        slow_seconds: after how many seconds in one call it is reported to hang
        outside: what it runs in
    """

    def __init__(self, listener: CheckpointListener, slow_seconds: float, outside: Outside) -> None:
        self._listener = listener
        super().__init__("ckpt-listener", f"the listener {type(listener).__name__}", outside)
        self._watch = Lane("ckpt-listener-watch", outside)
        self._failed = False
        #: Doubled with each slow call, so that a listener that is always slow fills no log.
        self._slow_seconds = slow_seconds

    def tell(self, method: str, *reports: SaveReport | LoadReport) -> None:
        """Call a method of the listener after the earlier calls; never waits."""
        with contextlib.suppress(CheckpointError):  # it is closed
            self.post(self._call, method, *reports)

    def stop(self, *, cancel: bool = True) -> None:
        """See the base class."""
        super().stop(cancel=cancel)
        self._watch.stop(cancel=False)

    def _call(self, method: str, *reports: SaveReport | LoadReport) -> None:
        limit, began, returned = self._slow_seconds, self._outside.now(), self._outside.latch()
        with contextlib.suppress(CheckpointError, RuntimeError):  # no thread starts, and it is called all the same
            self._watch.submit(self._warn, method, limit, returned)
        try:
            getattr(self._listener, method)(*reports)
        except BaseException as error:  # SystemExit would end this thread, and nothing else
            self._report(method, error)
        finally:
            returned.set()
        took = self._outside.now() - began
        if took > limit:
            self._slow_seconds = 2 * took
            logger.warning("%s has returned from %s after %.1f s", self._whom, method, took)

    def _warn(self, method: str, limit: float, returned: Latch) -> None:
        """On the thread that watches: say so if a call does not return."""
        if not returned.wait(limit):
            text = "%s has not returned from %s for %g s; saves continue, and its later events wait"
            logger.warning(text, self._whom, method, limit)

    def _report(self, method: str, error: BaseException) -> None:
        """Log the first failure of the listener."""
        if not self._failed:
            self._failed = True
            text = "%s failed in %s (%s); it is still called for later events, and its further errors not logged"
            expected = isinstance(error, CheckpointError)
            logger.error(text, self._whom, method, describe_error(error), exc_info=not expected)


#: Most steps that wait to be recorded by a save or at the end, and most with which those of a save are compared.
_PENDING, _RECENT = 20_000, 256
#: Fewest steps without a save from which the usual length of a step is estimated.
_ENOUGH = 3


class StepTimes:
    """The ends of the steps that were not recorded yet, and of the last few that were.

    Args:
        outside: what the run runs in
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        self._date = outside.date
        self._pending: deque[tuple[int, float]] = deque(maxlen=_PENDING)
        self._last: int | None = None
        #: (step, its end, its length or None), oldest first.
        self._recent: deque[tuple[int, float, float | None]] = deque(maxlen=_RECENT)
        #: When recent saves began and ended.
        self._saves: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._taking = outside.lock()

    def ended(self, step: int) -> None:
        """A step has ended now. Called by the training thread, once or more for each step; costs less than 1 us."""
        if step != self._last:
            self._last = step
            self._pending.append((step, self._date()))

    def take(self) -> list[dict[str, Any]]:
        """The records of the steps since the last call: one per sequence of consecutive steps."""
        events: list[dict[str, Any]] = []
        with self._taking:
            follows = None
            while self._pending:
                step, end = self._pending.popleft()
                if step != follows:
                    events.append({"event": "steps", "time": round(end, 6), "first": step, "ends": []})
                events[-1]["ends"].append(round(end, 6))
                follows = step + 1
                before = self._recent[-1] if self._recent else (0, 0.0, None)
                self._recent.append((step, end, end - before[1] if before[0] == step - 1 else None))
        return events

    def lost(self, began: float, stall: float, ended: float) -> float:
        """Estimate what a save cost training: its stall, plus how much longer than others the steps beside it took.

        Only complete steps count. Without at least three that ran beside no save, the result is the stall.

        Args:
            began: when `save` was called, seconds since 1970
            stall: how long the call took
            ended: when the save ended, seconds since 1970
        """
        with self._taking:
            self._saves.append((began, ended))
            recent, saves = list(self._recent), list(self._saves)
        alone = [
            length
            for _, end, length in recent
            if length is not None and not any(first < end and end - length < last for first, last in saves)
        ]
        beside = [end for _, end, _ in recent if began + stall < end <= ended]
        if len(alone) < _ENOUGH or not beside:
            return stall
        return stall + max(beside[-1] - (began + stall) - len(beside) * statistics.median(alone), 0.0)


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
        """Record an event of work after the last save, also when this recorder is closed; call it after `note`."""
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
