"""Checkpointing for Megatron-style PyTorch training, configured with Hydra.

    from ckpt_component import build_manager

    with build_manager("async_persistent", overrides=["checkpoint.dir=checkpoints"]) as manager:
        start = manager.restore(state) or 0
        ...

Names are imported on first use, because Hydra's search-path plugin and the writer process import this package and
must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors as _errors
from ._lazy import lazy
from .errors import *  # noqa: F403  (the module imports nothing and is all public)

if TYPE_CHECKING:
    from .callers import AsyncCaller, AsyncCallsQueue, AsyncRequest, PersistentAsyncCaller, TemporalAsyncCaller
    from .checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
    from .compat import (
        CheckpointMetadataCache,
        CheckpointProcess,
        CheckpointProcessConfig,
        FileSystemWriterAsync,
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )
    from .config import compose_checkpoint
    from .config.megatron_args import add_checkpoint_args, compose_from_args
    from .events import CheckpointListener, LoadReport, SaveReport
    from .factory import build_checkpointer, build_manager, instantiate_manager
    from .managing.manager import CheckpointManager
    from .readers.weights import load_weights
    from .state.per_rank import PerRank
    from .storage.run_record import StoredConfig, stored_config, stored_metrics

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".callers": "AsyncCaller AsyncCallsQueue AsyncRequest PersistentAsyncCaller TemporalAsyncCaller",
        ".checkpointer": "AsyncCheckpointer Checkpointer SyncCheckpointer",
        ".config": "compose_checkpoint",
        ".config.megatron_args": "add_checkpoint_args compose_from_args",
        ".factory": "build_checkpointer build_manager instantiate_manager",
        ".state.per_rank": "PerRank",
        ".managing.manager": "CheckpointManager",
        ".readers.weights": "load_weights",
        ".compat": (
            "CheckpointProcess CheckpointProcessConfig CheckpointMetadataCache FileSystemWriterAsync "
            "save_state_dict_async_finalize save_state_dict_async_plan"
        ),
        ".events": "CheckpointListener LoadReport SaveReport",
        ".storage.run_record": "StoredConfig stored_config stored_metrics",
    },
)
__all__ += _errors.__all__
