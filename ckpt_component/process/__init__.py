"""Supervised processes: they start, answer, fail and end in bounded time, and know nothing of tensors.

Names are imported when they are first used. The function `spawn` is in the module of that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .byte_process import ByteProcess
    from .call_process import CallProcess
    from .call_worker import CallWorker
    from .checkpoint_process import (
        CheckpointProcess,
        CheckpointProcessConfig,
        CheckpointWriter,
        RankInfo,
        RequestType,
        WorkerRequest,
        WorkerResponse,
    )
    from .exit_text import describe_exit
    from .remote_error import RemoteTraceback
    from .spawn import (
        ProcessContext,
        ProcessException,
        ProcessExitedException,
        ProcessRaisedException,
        SpawnContext,
        StartMethodError,
        start_processes,
    )

__all__ = [
    "ByteProcess",
    "CallProcess",
    "CallWorker",
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointWriter",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "RankInfo",
    "RemoteTraceback",
    "RequestType",
    "SpawnContext",
    "StartMethodError",
    "WorkerRequest",
    "WorkerResponse",
    "describe_exit",
    "start_processes",
]

_HOMES = {
    "ByteProcess": "byte_process",
    "CallProcess": "call_process",
    "CallWorker": "call_worker",
    "CheckpointProcess": "checkpoint_process",
    "CheckpointProcessConfig": "checkpoint_process",
    "CheckpointWriter": "checkpoint_process",
    "ProcessContext": "spawn",
    "ProcessException": "spawn",
    "ProcessExitedException": "spawn",
    "ProcessRaisedException": "spawn",
    "RankInfo": "checkpoint_process",
    "RemoteTraceback": "remote_error",
    "RequestType": "checkpoint_process",
    "SpawnContext": "spawn",
    "StartMethodError": "spawn",
    "WorkerRequest": "checkpoint_process",
    "WorkerResponse": "checkpoint_process",
    "describe_exit": "exit_text",
    "start_processes": "spawn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
