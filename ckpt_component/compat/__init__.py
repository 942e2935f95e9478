"""The reference classes, under their own names and with their own behaviour.

The core does not know them. The function `spawn` is in the module of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .async_caller import AsyncCaller
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
    from .file_system_writer_async import FileSystemWriterAsync
    from .persistent_async import PersistentAsyncCaller
    from .plan_cache import CheckpointMetadataCache
    from .queue import AsyncCallsQueue
    from .request import AsyncRequest
    from .spawn import (
        ProcessContext,
        ProcessException,
        ProcessExitedException,
        ProcessRaisedException,
        SpawnContext,
        StartMethodError,
        start_processes,
    )
    from .state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
    from .temporal_async import TemporalAsyncCaller

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".async_caller": "AsyncCaller",
        ".persistent_async": "PersistentAsyncCaller",
        ".queue": "AsyncCallsQueue",
        ".request": "AsyncRequest",
        ".temporal_async": "TemporalAsyncCaller",
        ".call_process": "CallProcess",
        ".call_worker": "CallWorker",
        ".checkpoint_process": (
            "CheckpointProcess CheckpointProcessConfig CheckpointWriter RankInfo RequestType WorkerRequest "
            "WorkerResponse"
        ),
        ".spawn": (
            "ProcessContext ProcessException ProcessExitedException ProcessRaisedException SpawnContext "
            "StartMethodError start_processes"
        ),
        ".file_system_writer_async": "FileSystemWriterAsync",
        ".plan_cache": "CheckpointMetadataCache",
        ".state_dict_saver": "save_state_dict_async_finalize save_state_dict_async_plan",
    },
)
