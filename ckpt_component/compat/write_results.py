"""The results queue of the reference; this package does not use it."""

from __future__ import annotations

import queue
from typing import Any

#: The reference keeps its queue here.
_results_queue: Any = None


def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
    """Return an empty queue with the methods of the reference's.

    The results of a `FileSystemWriterAsync` are returned through memory of their own save, so that results of two saves
    cannot be mixed up. This queue needs no process and stays empty.

    Args:
        mp_mode: as in the reference: start method of its manager process
    """
    return queue.Queue()
