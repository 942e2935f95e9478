"""The process of the uploads as the run sees it: started, listened to, and left alone in the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..core.lane import Lane
from ..core.outside import OUTSIDE, Outside
from ..core.processes.start import Child, start_in_background
from .upload_policy import UploadPolicy

logger = logging.getLogger(__name__)

#: For the process to notice that its time is over.
_LEAVE_SECONDS = 5.0
#: After so many, one that was killed is started again while the run waits for it.
_AGAIN_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 300.0


class UploadChild:
    """The process of the uploads of this host, and a lane that takes its messages.

    Args:
        policy: what to upload
        take: called with each message, on the lane; the last one of a process is its exit code, `ended`
        again_after: seconds after which a process that was killed is started again, and twice as many the next time if
            it sent no message; None: by the next `start`, or when the run waits for its last upload
        outside: of the run
    """

    def __init__(
        self,
        policy: UploadPolicy,
        take: Callable[[dict[str, Any]], None],
        again_after: float | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._policy, self._take, self._again_after, self._outside = policy, take, again_after, outside
        self._lane = Lane("ckpt-upload", outside, jobs=f"uploads to {policy.target}")
        self._lock = outside.lock()
        self._process: Child | None = None
        self._ended, self._finishes = outside.latch(), False
        #: Whether the process was killed, and nothing has started it again.
        self._is_killed = False

    def began(self, step: int) -> None:
        """The run has begun after a step."""
        self._policy = replace(self._policy, began=step)

    def start(self) -> None:
        """Start the process, unless it is running or the run has ended."""
        with self._lock:
            if not (self._ended.is_set or self._lane.waiting):
                self._is_killed = False
                self._lane.submit(self._follow_all, self._launch())

    def send(self, message: dict[str, Any]) -> None:
        """Tell the process something, if it listens. Does not wait."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):  # it has ended, or it is stopped and has thousands of frames to receive
                process.send(message, self._outside.now())

    def end(self, *, finish: bool) -> None:
        """The run has ended: let uploads go on, for at most `finish_seconds`.

        Args:
            finish: wait for them
        """
        if finish and self._is_killed:
            self.start()
        self._finishes = finish
        self._ended.set()
        with self._lock:
            self._lane.stop(cancel=False)
            outside, limit = self._outside, self._policy.finish_seconds
        if self._process is None:
            return
        self._process.hang_up()
        if not finish:
            return  # the lane goes on reading; if the program ends, the process does not
        if not self._lane.drain(outside.now() + 0.2):
            logger.info("waiting up to %g s for uploads to %s", limit, self._policy.target)
        if not self._lane.drain(outside.now() + limit + _LEAVE_SECONDS):
            self._finishes = False
            self._process.kill()

    def _launch(self) -> Child:
        log = partial(logger.warning, "the process of the uploads: %s")
        self._process = process = start_in_background(self._policy.program, asdict(self._policy), log, self._outside)
        return process

    def _follow_all(self, process: Child) -> None:
        """On the lane: receive the messages of the process until it ends, and of those started in its place."""
        try:
            self._follow(process)
        except Exception:
            logger.exception("the process of the uploads is not listened to any more")

    def _follow(self, process: Child) -> None:
        pause, is_last = self._again_after, False
        while True:
            while (frame := process.receive()) is not None:
                self._take(frame[0])
                pause = self._again_after
            code = process.end(_LEAVE_SECONDS)
            self._take({"ended": code})
            if not code or is_last:
                return
            if pause is None and not self._ended.is_set:
                self._is_killed = True
                return
            if is_last := self._ended.wait(pause or 0.0):
                if not self._finishes:
                    return
                self._outside.sleep(_AGAIN_SECONDS)
            pause = pause and min(2 * pause, _LONGEST_PAUSE_SECONDS)
            process = self._launch()
            if self._ended.is_set:
                process.hang_up()
