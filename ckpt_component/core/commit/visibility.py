"""Wait for files of other ranks to become visible: network file systems cache names for up to half a minute."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CheckpointTimeoutError
from ..outside import OUTSIDE
from ..storage.storage import Storage

#: Polling intervals.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


def wait_visible(is_visible: Callable[[], bool], what: str, seconds: float, storage: Storage | None = None) -> None:
    """Poll until `is_visible` returns True.

    Args:
        is_visible: whether another rank's file is visible here
        what: what to name in the error message
        seconds: `timeouts.visible`
        storage: where it is made

    Raises:
        CheckpointTimeoutError: it did not become visible in time
    """
    if is_visible():
        return
    outside = OUTSIDE if storage is None else storage.outside
    deadline, pause = outside.now() + seconds, _FIRST_PAUSE
    with outside.waits.on(f"{what}, which another rank made, to be seen here", deadline) as wait:
        while True:
            remaining = deadline - outside.now()
            if remaining <= 0:
                late = f" after {seconds:g} s (timeouts.visible)" if seconds else ""
                raise CheckpointTimeoutError(
                    f"{what}, which another rank made, cannot be seen from here{late}; "
                    f"all ranks need one {(storage or Storage).common}."
                )
            wait.look()
            outside.sleep(min(pause, remaining))
            if is_visible():
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
