"""Who runs the work of a save: the trainer, a process per save, or one process for the whole run.

`InlineCaller`, `TemporalCaller` and `PersistentCaller` run the checkpointer's own byte writes. The others are the
reference classes for requests that a training script makes itself (seed 002). Names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_caller import AsyncCaller
    from .persistent_async import PersistentAsyncCaller
    from .queue import AsyncCallsQueue
    from .request import AsyncRequest
    from .temporal_async import TemporalAsyncCaller
    from .write_callers import InlineCaller, IoPriority, PersistentCaller, TemporalCaller, WriteCaller

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "InlineCaller",
    "IoPriority",
    "PersistentAsyncCaller",
    "PersistentCaller",
    "TemporalAsyncCaller",
    "TemporalCaller",
    "WriteCaller",
]

_HOMES = {
    "AsyncCaller": "async_caller",
    "AsyncCallsQueue": "queue",
    "AsyncRequest": "request",
    "InlineCaller": "write_callers",
    "IoPriority": "write_callers",
    "PersistentAsyncCaller": "persistent_async",
    "PersistentCaller": "write_callers",
    "TemporalAsyncCaller": "temporal_async",
    "TemporalCaller": "write_callers",
    "WriteCaller": "write_callers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
