"""Reading requests to a bucket are repeated for a while if they fail as requests may."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

#: How long a request that fails is repeated, after a first pause that doubles; obstore repeats some by itself.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 60.0, 0.1, 5.0
#: What no repetition changes.
_FINAL = frozenset({errno.ENOENT, errno.EACCES, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP})


def patiently(call: Callable[[], _Result], path: str, seconds: float | None = None) -> _Result:
    """Call a function that makes a request, and again after a pause if it fails as requests may.

    Args:
        call: the function.
        path: what it is about, for the log.
        seconds: how long it is called again, counted from its first call; None: a minute.

    Raises:
        OSError: it failed for too long, or in a way that no repetition changes.
    """
    deadline, pause = time.monotonic() + (_PATIENCE if seconds is None else seconds), _PAUSE
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno in _FINAL or time.monotonic() + pause > deadline:
                raise
            logger.info("reading %s again in %.1f s: %s", path, pause, error)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
