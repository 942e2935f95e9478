"""What follows the commits of a run: `Follower`, a queue of processes, and what these know of the run."""

from __future__ import annotations

import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..core.commit.fencing import Owner, read_owner
from ..core.job import Job
from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.framing import Channel, Frame
from ..core.processes.serve import FrameRequest, answer_requests
from ..core.processes.start import start_in_background
from ..core.storage.files import FileStorage
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from ..events import SaveReport
from .upload_policy import UploadPolicy


class Follower(ABC):
    """Called by a run where something becomes of its checkpoints. It works in its own process; no call waits.

    A failure never stops training, unless `check` raises.
    """

    def start(self, step: int = 0) -> None:
        """The run has begun after `step`."""

    def check(self) -> None:
        """Before a save: raise what must fail it."""

    def on_commit(self, report: SaveReport) -> None:
        """A checkpoint was committed. Called on the leading rank, on the save thread."""

    def on_kept(self, report: SaveReport) -> None:
        """A snapshot is whole in memory; its path is there. Called on the leading rank, on the thread of that lane."""

    def in_use(self) -> set[str]:
        """The paths of checkpoints that must not be deleted now."""
        return set()

    @abstractmethod
    def end(self, *, finish: bool) -> None:
        """The run has ended; the one call that may wait, for a bounded time.

        Args:
            finish: it has come to its end, so what is left to do is done
        """


logger = logging.getLogger(__name__)

#: For a process whose work is given up to delete its files.
_LEAVE_SECONDS = 5.0


class RequestQueue:
    """While one checkpoint is worked on, only the newest request waits.

    Args:
        module: of the process; it gets a job, sends an answer, such as the `error` of one that failed, and ends
        name: of the thread
        work: called on the thread for each request; calls `run`, and raises nothing
        timeout: seconds for one request
        setting: where the timeout comes from, for the text of an error
        outside: of the run
    """

    def __init__(
        self,
        module: str,
        name: str,
        work: Callable[[SaveReport], None],
        timeout: float,
        setting: str,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._name, self._work = name, work
        self._timeout, self._setting, self._outside = timeout, setting, outside
        self._lock = outside.lock()
        launch = partial(start_in_background, module, outside=outside)
        self._job = Job(f"{name} process", launch, outside, once=True, leave_seconds=_LEAVE_SECONDS)
        #: What is worked on now, and what waits, in order.
        self._pending = pending = dict[Future[None], SaveReport]()
        self._lane = Lane(name, outside, jobs=partial(_in_words, name, pending))
        self._given_up = False

    def add(self, report: SaveReport) -> list[SaveReport]:
        """Work on a checkpoint. Does not wait; returns the request that gives way, if there is one."""
        with self._lock:
            if self._given_up:
                return []
            # Not `newest_only`: the first one has its turn, even if it has not begun.
            skipped = [waiting for future, waiting in [*self._pending.items()][1:] if future.cancel()]
            future = self._lane.submit(self._work, report)
            self._pending[future] = report
            future.add_done_callback(self._pending.pop)
        return skipped

    def in_use(self) -> set[str]:
        """The checkpoints that are or will be worked on."""
        with self._lock:
            return {report.path for report in [*self._pending.values()]}

    def end(self, *, finish: bool) -> None:
        """Wait for the requests, or end the process of the one that runs. Bounded by their deadlines.

        Args:
            finish: wait
        """
        with self._lock:
            last = [report.path for report in [*self._pending.values()][-1:]]
            if not finish:
                self._given_up = True
                self._lane.stop()
        if not last:
            return
        if finish:
            logger.info("waiting until %s is done (%s)", *last, self._name)
        else:
            self._job.give_up("was given up")
        # One that runs and one that waits; each ends by itself at its deadline.
        self._lane.drain(self._outside.now() + 2 * (self._timeout + _LEAVE_SECONDS))

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """On the thread: have a process do something, and return its answer.

        Raises:
            CheckpointTimeoutError: it took too long
            CheckpointSaveError: it failed, or was given up
        """
        try:
            answer = self._job.ask(request, self._timeout, "its request")[0]
        except CheckpointTimeoutError as error:
            raise CheckpointTimeoutError(f"it took longer than {self._timeout:g} s ({self._setting})") from error
        except CheckpointSaveError as error:
            if self._given_up:
                raise CheckpointSaveError("the run has ended before its end") from error
            raise
        if "error" in answer:
            raise CheckpointSaveError(answer["error"])
        return answer


def _in_words(name: str, pending: Mapping[Any, SaveReport]) -> str:
    return f"{name} of {', '.join(report.path for report in [*pending.values()])}"


_LOOK_SECONDS = 0.5


class RunWatch:
    """Watches the run that this process belongs to.

    Args:
        policy: what is uploaded
        files: the file system of the local folder, by whose outside it waits; None: that of this host

    Attributes:
        changed: set when there may be more to upload; then the next change has another one
        ended: set when the run has ended
        newest: the newest step that the run has reported
    """

    def __init__(self, policy: UploadPolicy, files: FileStorage | None = None) -> None:
        self._policy = policy
        self._files = FileStorage() if files is None else files
        self._outside = outside = self._files.outside
        self.changed, self.ended = outside.latch(), outside.latch()
        self.newest, self._until = 0, math.inf
        #: The run itself, and the one before it, which owns the folder until the first save. Seen before any upload.
        self._known = {policy.run, self._owner()[0]}

    def watch(self, run: Channel, report: Callable[[dict[str, Any]], None]) -> None:
        """Listen to the run; end this process when its time is over, or another run has taken over the local folder."""
        try:
            receive = partial(self._receive, run, report)
            answer_requests(run, {}, _refuse, notes={"committed": self._note}, receive=receive)
        finally:
            self._outside.exit()  # as if it was killed, whatever the storage is doing

    def _note(self, committed: FrameRequest) -> None:
        self.newest = committed.header["step"] or self.newest
        self._change()

    def _receive(self, run: Channel, report: Callable[[dict[str, Any]], None]) -> Frame | None:
        """What the run says next; None: it has ended some time ago, or another one has taken over."""
        outside = self._outside
        while outside.now() < self._until:
            frame = None
            if self.ended.is_set:
                outside.sleep(_LOOK_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    frame = run.receive(outside.now() + _LOOK_SECONDS)
                    if frame is None:
                        self._until = outside.now() + self._policy.finish_seconds
                        self.ended.set()
                        self._change()
            token, owner = self._owner()
            if token and token not in self._known:
                report({"fenced": f"Another run took over {self._policy.source} ({owner})."})
                return None
            if frame is not None:
                return frame
        return None

    def _change(self) -> None:
        changed, self.changed = self.changed, self._outside.latch()
        changed.set()

    def _owner(self) -> tuple[str, Owner | None]:
        """The token of the owner of the local folder, and the owner; none while it cannot be read."""
        try:
            owner = read_owner(self._files, self._policy.source)
        except OSError:  # the uploads report what is wrong with the folder
            owner = None
        return ("", None) if owner is None else (owner.token, owner)


def _refuse(request: FrameRequest) -> dict[str, Any]:
    raise CheckpointError(f"The process of the uploads knows no request {request.header['kind']!r}.")
