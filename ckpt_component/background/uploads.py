"""The run's side of its uploads: the process that copies checkpoints of the local folder to their permanent place.

A dead or slow target never stops training: it is a warning with the lag, and by `upload.on_lag` an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..config.schema import Upload
from ..core.lane import Lane
from ..core.options import OnLag
from ..core.outside import OUTSIDE, Outside
from ..core.processes.start import Child, start_in_background
from ..core.storage.space import amount
from ..errors import CheckpointFencedError, CheckpointSaveError
from ..events import SaveReport
from .jobs import Follower
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
        """The run has ended: let uploads continue, for at most `finish_seconds`.

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
            return  # the lane continues reading; if the program ends, the process does not
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


class BackgroundUploads(Follower):
    """Owns the process that begins and commits uploads, on rank 0.

    Args:
        policy: what to upload
        settings: how far the target may fall behind, and what happens beyond that
        outside: of the run
    """

    def __init__(self, policy: UploadPolicy, settings: Upload, outside: Outside = OUTSIDE) -> None:
        self._policy, self._settings = policy, settings
        self._child = UploadChild(policy, self._take, outside=outside)
        #: Of this run, the newest step that is due, and the size of its checkpoint.
        self._newest: tuple[int, int] | None = None
        #: The newest step in the target, or where the run began.
        self._uploaded = 0
        #: The step that is being uploaded, and the newest one that waits.
        self._current: int | None = None
        self._waiting: int | None = None
        self._error: str | None = None
        self._fenced: str | None = None
        #: The lag at the last warning; the next comes when it has doubled.
        self._warned = 0

    def start(self, step: int = 0) -> None:
        """Upload what earlier runs left, from now on; the run begins after `step`."""
        self._uploaded = max(self._uploaded, step)
        self._child.began(step)
        self._start()

    def on_commit(self, report: SaveReport) -> None:
        """Upload a checkpoint, unless another comes before its turn. Does not wait."""
        if report.step is not None and self._policy.is_due(report.step):
            self._newest = report.step, report.bytes
            skipped, self._waiting = self._waiting, report.step
            if skipped is not None and self._current is not None:
                self._warn(f"and step {skipped} is skipped, because step {self._current} is still being uploaded")
        self._start()
        self._child.send({"kind": "committed", "step": report.step})

    def in_use(self) -> set[str]:
        """The local checkpoint that is being uploaded, which must not be deleted."""
        current = self._current
        return set() if current is None else {self._path(self._policy.source, current)}

    def check(self) -> None:
        """Before a save: raise if the target is taken by another run, or too far behind and `on_lag` is `error`.

        Raises:
            CheckpointFencedError: another run took over the target
            CheckpointSaveError: it is too far behind
        """
        if self._fenced is not None:
            raise CheckpointFencedError(self._fenced)
        most = self._settings.max_lag_steps
        if most is None or self.lag_steps <= most:
            return
        why = f"that is more than checkpoint.upload.max_lag_steps={most}"
        if self._settings.on_lag is OnLag.error:
            raise CheckpointSaveError(f"{self._behind()}; {why} (checkpoint.upload.on_lag=error).{self._because()}")
        self._warn(why)

    @property
    def lag_steps(self) -> int:
        """By how many steps the target is behind the newest checkpoint that is due."""
        return 0 if self._newest is None else max(self._newest[0] - self._uploaded, 0)

    def end(self, *, finish: bool) -> None:
        """The run has ended: let uploads continue, for at most `finish_seconds`.

        Args:
            finish: wait for them
        """
        self._child.end(finish=finish)
        if finish and self.lag_steps and self._fenced is None:
            logger.warning("%s; the next run goes on with it.%s", self._behind(), self._because())

    def _start(self) -> None:
        if self._fenced is None:
            self._child.start()

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("remote") is not None:
            self._uploaded = max(self._uploaded, message["remote"])
        elif "began" in message:
            self._current = message["began"]
            if self._current == self._waiting:
                self._waiting = None
        elif "uploaded" in message:
            step, self._current, self._error = message["uploaded"], None, None
            self._uploaded = max(self._uploaded, step)
            if not self.lag_steps:
                self._warned = 0
            size, name = amount(message["bytes"]), self._policy.names.folder(step)
            logger.info("%s uploaded: %s in %.1f s, to %s", name, size, message["seconds"], self._policy.target)
        elif "fenced" in message:
            self._fenced = message["fenced"]
            logger.warning("uploads have stopped: %s", self._fenced)  # the next save raises it, if there is one
        elif "ended" in message:
            self._current, code = None, message["ended"]
            if code:
                logger.warning("the process of the uploads ended with code %d; the next save starts it again", code)
        elif "failed" in message:
            self._current, first, self._error = None, self._error is None, message["error"]
            if first or self.lag_steps >= 2 * self._warned:
                self._warned = max(self.lag_steps, 1)
                logger.warning("%s; the run continues, and uploads are tried again.%s", self._behind(), self._because())

    def _warn(self, why: str) -> None:
        """Warn of the lag, if it has doubled since the last time."""
        if self.lag_steps > max(2 * self._warned - 1, self._settings.max_lag_steps or 0):
            self._warned = self.lag_steps
            logger.warning("%s, %s.%s", self._behind(), why, self._because())

    def _behind(self) -> str:
        if self._newest is None or not self.lag_steps:
            return f"uploads to {self._policy.target} fail"
        step, size = self._newest
        return f"{self._policy.target} is {self.lag_steps} steps behind step {step} ({amount(size)} to upload)"

    def _because(self) -> str:
        return "" if self._error is None else f" The last upload failed: {self._error}"

    def _path(self, root: str, step: int) -> str:
        return os.path.join(root, self._policy.names.folder(step))


#: After so many, a process that was killed is started again.
_AGAIN_SECONDS = 1.0


class HostUploads(Follower):
    """Owns the process of the uploads on the first rank of a host that does not commit them, but sends its files.

    How far they are behind, the leader says.

    Args:
        policy: what to upload
        outside: of the run
    """

    def __init__(self, policy: UploadPolicy, outside: Outside = OUTSIDE) -> None:
        self._policy = policy
        self._failed = False
        self._child = UploadChild(policy, self._take, _AGAIN_SECONDS, outside)

    def start(self, step: int = 0) -> None:
        """Send what the leading host asks for, from now on; the run begins after `step`."""
        self._child.began(step)
        self._child.start()

    def end(self, *, finish: bool) -> None:
        """The run has ended: let uploads continue, for at most `finish_seconds`.

        Args:
            finish: wait for them
        """
        self._child.end(finish=finish)

    def _take(self, message: dict[str, Any]) -> None:
        host = self._policy.host
        if "sent" in message:
            self._failed, name = False, self._policy.names.folder(message["sent"])
            size, seconds = amount(message["bytes"]), message["seconds"]
            logger.info("%s: %s sent its files in %.1f s: %s, to %s", name, host, seconds, size, self._policy.target)
        elif "fenced" in message:
            logger.warning("uploads of %s have stopped: %s", host, message["fenced"])
        elif message.get("ended"):
            logger.warning(
                "the process of the uploads of %s ended with code %d; it is started again", host, message["ended"]
            )
        elif "failed" in message and not self._failed:
            self._failed = True
            text = "%s cannot send its files to %s, and tries again: %s"
            logger.warning(text, host, self._policy.target, message["error"])
