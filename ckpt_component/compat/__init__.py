"""The reference classes with their original names and behaviour.

The core does not use them. The function `spawn` is in the module of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .async_callers import (
        AsyncCaller as AsyncCaller,
        PersistentAsyncCaller as PersistentAsyncCaller,
        TemporalAsyncCaller as TemporalAsyncCaller,
    )
    from .async_queue import AsyncCallsQueue as AsyncCallsQueue
    from .async_request import AsyncRequest as AsyncRequest
    from .checkpoint_process import (
        CheckpointProcess as CheckpointProcess,
        CheckpointProcessConfig as CheckpointProcessConfig,
        CheckpointWriter as CheckpointWriter,
        RankInfo as RankInfo,
        RequestType as RequestType,
        WorkerRequest as WorkerRequest,
        WorkerResponse as WorkerResponse,
    )
    from .file_system_writer_async import (
        CachedMetadataFileSystemReader as CachedMetadataFileSystemReader,
        FileSystemWriterAsync as FileSystemWriterAsync,
        get_write_results_queue as get_write_results_queue,
    )
    from .spawn import (
        ProcessContext as ProcessContext,
        ProcessException as ProcessException,
        ProcessExitedException as ProcessExitedException,
        ProcessRaisedException as ProcessRaisedException,
        SpawnContext as SpawnContext,
        StartMethodError as StartMethodError,
        start_processes as start_processes,
    )
    from .state_dict_saver import (
        CheckpointMetadataCache as CheckpointMetadataCache,
        save_state_dict_async_finalize as save_state_dict_async_finalize,
        save_state_dict_async_plan as save_state_dict_async_plan,
    )
    from .worker_client import CallProcess as CallProcess, WorkerClient as WorkerClient

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".async_callers": "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller",
        ".async_queue": "AsyncCallsQueue",
        ".async_request": "AsyncRequest",
        ".worker_client": "CallProcess WorkerClient",
        ".checkpoint_process": (
            "CheckpointProcess CheckpointProcessConfig CheckpointWriter RankInfo RequestType "
            "WorkerRequest WorkerResponse"
        ),
        ".spawn": (
            "ProcessContext ProcessException ProcessExitedException ProcessRaisedException SpawnContext "
            "StartMethodError start_processes"
        ),
        ".file_system_writer_async": "FileSystemWriterAsync get_write_results_queue CachedMetadataFileSystemReader",
        ".state_dict_saver": "CheckpointMetadataCache save_state_dict_async_finalize save_state_dict_async_plan",
    },
)
