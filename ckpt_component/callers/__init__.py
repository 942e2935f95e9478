"""Who runs the writes of a save: the trainer, a process per save, or one process for the whole run.

The reference classes for requests that a training script makes itself (`AsyncCallsQueue` and its parts) can be
imported from here too; their code is in `ckpt_component.compat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from ..compat.async_callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
    from ..compat.async_queue import AsyncCallsQueue
    from ..compat.async_request import AsyncRequest
    from .write_callers import InlineCaller, IoPriority, PersistentCaller, TemporalCaller, WriteCaller

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".write_callers": "InlineCaller IoPriority PersistentCaller TemporalCaller WriteCaller",
        "..compat.async_callers": "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller",
        "..compat.async_queue": "AsyncCallsQueue",
        "..compat.async_request": "AsyncRequest",
    },
)
