"""The process of the uploads as the run sees it: started, listened to, and left alone in the end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from ..core.processes.start import Child, start_in_background
from .upload_policy import UploadPolicy

logger = logging.getLogger(__name__)

_PROCESS = "ckpt_component.background.upload_process"

#: For the process to notice that its time is over.
_LEAVE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0


class UploadChild:
    """The process of the uploads of this host, and a thread that takes its messages.

    Args:
        policy: what to upload
        take: called with each message, in the thread; the last one of a process is its exit code, `ended`
        again_after: seconds after which a process that was killed is started again, and twice as many the next time if
            it said nothing; None: by the next `start`
    """

    def __init__(
        self, policy: UploadPolicy, take: Callable[[dict[str, Any]], None], again_after: float | None = None
    ) -> None:
        self._policy, self._take, self._again_after = policy, take, again_after
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the process, unless it is running or the run has ended."""
        with self._lock:
            if self._ended.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            process = self._launch()
            self._thread = threading.Thread(target=self._follow, args=(process,), name="ckpt-upload", daemon=True)
            self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Tell the process something, if it listens. Does not wait."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):  # it has ended, or it is stopped and has thousands of frames to receive
                process.send(message, time.monotonic())

    def end(self, *, finish: bool) -> None:
        """The run has ended: let uploads go on, for at most `finish_seconds`.

        Args:
            finish: wait for them
        """
        self._ended.set()
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return
        process.hang_up()
        if not finish:
            return  # the thread goes on reading; if the program ends, the process does not
        thread.join(0.2)
        if thread.is_alive():
            logger.info("waiting up to %g s for uploads to %s", self._policy.finish_seconds, self._policy.target)
        thread.join(self._policy.finish_seconds + _LEAVE_SECONDS)
        if thread.is_alive():
            process.kill()

    def _launch(self) -> Child:
        log = partial(logger.warning, "the process of the uploads: %s")
        self._process = process = start_in_background(_PROCESS, asdict(self._policy), log)
        return process

    def _follow(self, process: Child) -> None:
        """Receive the messages of the process until it ends, and of those that are started in its place."""
        pause = self._again_after
        while True:
            while (frame := process.receive()) is not None:
                self._take(frame[0])
                pause = self._again_after
            code = process.end(_LEAVE_SECONDS)
            self._take({"ended": code})
            if not code or pause is None or self._ended.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            process = self._launch()
