"""What the process of the uploads knows of its run: whether it goes on, and that it owns the local folder."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

from ..core.commit.fencing import Owner, read_owner
from ..core.processes.framing import Channel
from ..core.storage.files import FileStorage
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
        self.newest = 0
        #: The run itself, and the one before it, which owns the folder until the first save. Seen before any upload.
        self._known = {policy.run, self._owner()[0]}

    def watch(self, parent: Channel, report: Callable[[dict[str, Any]], None]) -> None:
        """Listen to the run; end this process when its time is over, or another run has taken over the local folder."""
        try:
            self._watch(parent, report)
        finally:
            os._exit(0)  # as if it was killed, whatever the storage is doing

    def _watch(self, parent: Channel, report: Callable[[dict[str, Any]], None]) -> None:
        outside, deadline = self._outside, math.inf
        while outside.now() < deadline:
            if self.ended.is_set:
                outside.sleep(_LOOK_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    frame = parent.receive(outside.now() + _LOOK_SECONDS)
                    if frame is None:
                        deadline = outside.now() + self._policy.finish_seconds
                        self.ended.set()
                    else:
                        self.newest = frame[0]["newest"] or self.newest
                    changed, self.changed = self.changed, outside.latch()
                    changed.set()
            token, owner = self._owner()
            if token and token not in self._known:
                report({"fenced": f"Another run took over {self._policy.source} ({owner})."})
                return

    def _owner(self) -> tuple[str, Owner | None]:
        """The token of the owner of the local folder, and the owner; none while it cannot be read."""
        try:
            owner = read_owner(self._files, self._policy.source)
        except OSError:  # the uploads report what is wrong with the folder
            owner = None
        return ("", None) if owner is None else (owner.token, owner)
