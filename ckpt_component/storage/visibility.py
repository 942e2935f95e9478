"""What one rank made is seen later by others where a network file system caches names (29 s were measured)."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import CheckpointTimeoutError

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


def wait_visible(seen: Callable[[], bool], what: str, seconds: float) -> None:
    """Return when `seen` says so.

    Args:
        seen: looks whether what another rank made is there.
        what: for the message.
        seconds: `timeouts.visible`.

    Raises:
        CheckpointTimeoutError: it did not appear.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not seen():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise CheckpointTimeoutError(
                f"{what}, which another rank made, cannot be seen from here after {seconds:g} s (timeouts.visible); "
                "all ranks need one checkpoint.dir on a file system that they share."
            )
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _LONGEST_PAUSE)
