"""The uploads of a host other than the leading rank's: a process that sends the files of its local folder."""

from __future__ import annotations

import logging
from typing import Any

from ..core.outside import OUTSIDE, Outside
from ..core.storage.space import amount
from .follower import Follower
from .upload_child import UploadChild
from .upload_policy import UploadPolicy

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0


class HostUploads(Follower):
    """Owns the process of the uploads on the first rank of such a host. How far they are behind, the leader says.

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
        """The run has ended: let uploads go on, for at most `finish_seconds`.

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
