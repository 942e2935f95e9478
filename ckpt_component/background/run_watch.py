"""What the process of the uploads knows of its run: whether it goes on, and that it owns the local folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.commit.fencing import Owner, read_owner
from ..core.processes.framing import Channel, Frame
from ..core.processes.serve import FrameRequest, answer_requests
from ..core.storage.files import FileStorage
from ..errors import CheckpointError
from .upload_policy import UploadPolicy

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
