"""Checkpointing for Megatron-style PyTorch training, put together from Hydra configs.

    from ckpt_component import build_manager

    with build_manager("async_persistent", overrides=["checkpoint.dir=checkpoints"]) as manager:
        start = manager.restore(state) or 0
        ...

Names are imported when they are first used: Hydra's search-path plugin and the writer process import this
package, and neither may pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointBusyError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFencedError,
    CheckpointGivenUpError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointStallError,
    CheckpointStepError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    CheckpointTypeError,
    CheckpointUnreadableError,
    CheckpointWorldError,
    MissingKeysError,
    RanksError,
    TornSnapshotError,
    UnexpectedKeysError,
    WorkerDiedError,
)

if TYPE_CHECKING:
    from .callers import (
        AsyncCaller,
        AsyncCallsQueue,
        AsyncRequest,
        PersistentAsyncCaller,
        TemporalAsyncCaller,
    )
    from .checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
    from .config import compose_checkpoint
    from .config.errors import CheckpointConfigError
    from .config.megatron_args import add_checkpoint_args, compose_from_args
    from .factory import build_checkpointer, build_manager
    from .image.per_rank import PerRank
    from .manager import CheckpointManager
    from .process import CheckpointProcess, CheckpointProcessConfig
    from .reports import SaveReport
    from .writers.file_system_writer_async import FileSystemWriterAsync
    from .writers.plan_cache import CheckpointMetadataCache
    from .writers.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan

__version__ = "0.1.0"

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncCheckpointer",
    "AsyncRequest",
    "CheckpointBusyError",
    "CheckpointConfigError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFencedError",
    "CheckpointGivenUpError",
    "CheckpointLoadError",
    "CheckpointManager",
    "CheckpointMetadataCache",
    "CheckpointNotFoundError",
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointSaveError",
    "CheckpointStageError",
    "CheckpointStallError",
    "CheckpointStepError",
    "CheckpointStorageFullError",
    "CheckpointTimeoutError",
    "CheckpointTypeError",
    "CheckpointUnreadableError",
    "CheckpointWorldError",
    "Checkpointer",
    "FileSystemWriterAsync",
    "MissingKeysError",
    "PerRank",
    "PersistentAsyncCaller",
    "RanksError",
    "SaveReport",
    "SyncCheckpointer",
    "TemporalAsyncCaller",
    "TornSnapshotError",
    "UnexpectedKeysError",
    "WorkerDiedError",
    "add_checkpoint_args",
    "build_checkpointer",
    "build_manager",
    "compose_checkpoint",
    "compose_from_args",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

_HOMES = {
    "AsyncCaller": "callers",
    "AsyncCallsQueue": "callers",
    "AsyncCheckpointer": "checkpointer",
    "AsyncRequest": "callers",
    "CheckpointConfigError": "config.errors",
    "CheckpointManager": "manager",
    "CheckpointMetadataCache": "writers.plan_cache",
    "CheckpointProcess": "process",
    "CheckpointProcessConfig": "process",
    "Checkpointer": "checkpointer",
    "FileSystemWriterAsync": "writers.file_system_writer_async",
    "PerRank": "image.per_rank",
    "PersistentAsyncCaller": "callers",
    "SaveReport": "reports",
    "SyncCheckpointer": "checkpointer",
    "TemporalAsyncCaller": "callers",
    "add_checkpoint_args": "config.megatron_args",
    "build_checkpointer": "factory",
    "build_manager": "factory",
    "compose_checkpoint": "config",
    "compose_from_args": "config.megatron_args",
    "save_state_dict_async_finalize": "writers.state_dict_saver",
    "save_state_dict_async_plan": "writers.state_dict_saver",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
