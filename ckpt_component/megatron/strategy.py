"""The classes and functions for Megatron, with the settings of its run.

NVRx and Megatron's own async strategy use the same names. Only the planning function has different parameters and
results in the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.async_queue import AsyncCallsQueue
from ..compat.async_request import AsyncRequest
from ..compat.file_system_writer_async import (
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    get_write_results_queue,
)
from ..compat.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from .args import MegatronSettings


def async_names(settings: Callable[[], MegatronSettings]) -> dict[str, Any]:
    """Create the names of `NAMES`, with the signatures of NVRx.

    Args:
        settings: returns the settings of the run; called when a queue or writer is created, because Megatron parses its
            options late
    """
    cache = CheckpointMetadataCache()  # for callers that pass none

    class MegatronCallsQueue(AsyncCallsQueue):
        """A queue whose worker processes do not import the training script."""

        def __init__(self, persistent: bool = True, cpu_shm_mode: bool = False, **_nvrx_options: Any) -> None:
            super().__init__(
                persistent,
                cpu_priority=settings().nice,
                io_priority=settings().io_priority,
                **_process_options(settings()),
            )

        @staticmethod
        def warmup_persistent_caller(  # type: ignore[override]
            rank: int,
            mp_mode: str = "spawn",
            cpu_priority: int | None = None,
            io_priority: int | None = None,
            cpu_shm_mode: bool = False,
            otel_bootstrap: Any = None,
            **_nvrx_options: Any,
        ) -> None:
            """As in the base class; the settings supply the priorities if none are passed."""
            AsyncCallsQueue.warmup_persistent_caller(
                rank,
                cpu_priority=settings().nice if cpu_priority is None else cpu_priority,
                io_priority=settings().io_priority if io_priority is None else io_priority,
                **_process_options(settings()),
            )

    class MegatronFileSystemWriter(FileSystemWriterAsync):
        """A writer with the number of files that the settings ask for."""

        def __init__(
            self,
            *args: Any,
            thread_count: int = 1,
            use_cached_data_structure: bool = False,
            use_cpu_shm_for_gpu_tensors: bool = False,
            **kwargs: Any,
        ) -> None:
            # Both options are dropped without a warning: plans and host memory are reused in any case.
            kwargs.setdefault("sync_files", settings().sync_files)
            super().__init__(*args, thread_count=settings().workers or thread_count, **kwargs)

    def plan(
        state_dict: Any,
        storage_writer: FileSystemWriterAsync,
        process_group: Any = None,
        coordinator_rank: int = 0,
        planner: Any = None,
        enable_cache: bool = False,
        metadata_cache: CheckpointMetadataCache | None = None,
    ) -> Any:
        """`save_state_dict_async_plan` that always caches; cached plans are verified before they are reused."""
        return save_state_dict_async_plan(
            state_dict,
            storage_writer,
            process_group,
            coordinator_rank,
            planner,
            metadata_cache=metadata_cache or cache,
        )

    return {
        "AsyncCallsQueue": MegatronCallsQueue,
        "AsyncRequest": AsyncRequest,
        "CachedMetadataFileSystemReader": CachedMetadataFileSystemReader,
        "CheckpointMetadataCache": CheckpointMetadataCache,
        "FileSystemWriterAsync": MegatronFileSystemWriter,
        "_results_queue": None,
        "get_write_results_queue": get_write_results_queue,
        "save_state_dict_async_finalize": save_state_dict_async_finalize,
        "save_state_dict_async_plan": plan,
    }


def plan_as_megatron(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Give the planning function the signature of Megatron's own async strategy.

    Args:
        plan: `save_state_dict_async_plan` of `async_names`
    """

    def save_state_dict_async_plan(
        *args: Any, cached_ckpt_structure: Any = None, loaded_all_plans: Any = None, **kwargs: Any
    ) -> tuple[Any, None, None, bool, bool]:
        """Return the arguments of the finalize function, and no plans for Megatron to cache."""
        return plan(*args, **kwargs), None, None, False, False

    return save_state_dict_async_plan


def _process_options(settings: MegatronSettings) -> dict[str, Any]:
    return {
        "start_timeout": settings.worker_start,
        "write_timeout": settings.write,
        "close_timeout": settings.close,
        "import_main": False,
    }
