"""The queue of the reference that results of writes come through; nothing of this package puts anything there."""

from __future__ import annotations

import queue
from typing import Any

#: The reference keeps its queue, and the process that serves it, in this name of its module.
_results_queue: Any = None


def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
    """A queue with the methods of the reference's.

    The results of a `FileSystemWriterAsync` come back through memory of their own save, so that those of one save are
    never taken for another's. So this queue needs no process, and stays empty.

    Args:
        mp_mode: how the reference starts the process that serves its queue.
    """
    return queue.Queue()
