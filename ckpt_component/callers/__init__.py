"""Callers, which run the writes of a save: in the trainer, in a process per save, or in one process for the whole run.

The reference classes for requests made by a training script (`AsyncCallsQueue` and its parts) can be imported from here
too; their code is in `ckpt_component.compat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from ..compat.async_callers import (
        AsyncCaller as AsyncCaller,
        PersistentAsyncCaller as PersistentAsyncCaller,
        TemporalAsyncCaller as TemporalAsyncCaller,
    )
    from ..compat.async_queue import AsyncCallsQueue as AsyncCallsQueue
    from ..compat.async_request import AsyncRequest as AsyncRequest
    from ..core.options import IoPriority as IoPriority
    from .write_callers import (
        InlineCaller as InlineCaller,
        PersistentCaller as PersistentCaller,
        TemporalCaller as TemporalCaller,
        WriteCaller as WriteCaller,
    )

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "..core.options": "IoPriority",
        ".write_callers": "InlineCaller PersistentCaller TemporalCaller WriteCaller",
        "..compat.async_callers": "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller",
        "..compat.async_queue": "AsyncCallsQueue",
        "..compat.async_request": "AsyncRequest",
    },
)
