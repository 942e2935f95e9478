"""Checkpointing for Megatron-style PyTorch training, configured with Hydra.

    from ckpt_component import build_manager

    with build_manager("async_persistent", overrides=["checkpoint.dir=checkpoints"]) as manager:
        start = manager.restore(state) or 0
        ...

Names are imported on first use, because Hydra's search-path plugin and the writer process import this package and
must not import torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import errors as _errors
from ._version import __version__ as __version__
from .core._lazy import lazy
from .errors import *  # noqa: F403  (the module imports nothing and is all public)

if TYPE_CHECKING:
    from .callers import (
        AsyncCaller as AsyncCaller,
        AsyncCallsQueue as AsyncCallsQueue,
        AsyncRequest as AsyncRequest,
        PersistentAsyncCaller as PersistentAsyncCaller,
        TemporalAsyncCaller as TemporalAsyncCaller,
    )
    from .checkpointer import (
        AsyncCheckpointer as AsyncCheckpointer,
        Checkpointer as Checkpointer,
        SyncCheckpointer as SyncCheckpointer,
    )
    from .compat import (
        CheckpointMetadataCache as CheckpointMetadataCache,
        CheckpointProcess as CheckpointProcess,
        CheckpointProcessConfig as CheckpointProcessConfig,
        FileSystemWriterAsync as FileSystemWriterAsync,
        save_state_dict_async_finalize as save_state_dict_async_finalize,
        save_state_dict_async_plan as save_state_dict_async_plan,
    )
    from .config import compose_checkpoint as compose_checkpoint
    from .core.commit.run_record import (
        StoredConfig as StoredConfig,
        stored_config as stored_config,
        stored_metrics as stored_metrics,
    )
    from .events import CheckpointListener as CheckpointListener, LoadReport as LoadReport, SaveReport as SaveReport
    from .factory.graph import (
        build_checkpointer as build_checkpointer,
        build_manager as build_manager,
        instantiate_manager as instantiate_manager,
    )
    from .factory.weights import load_weights as load_weights
    from .managing.manager import CheckpointManager as CheckpointManager
    from .megatron.args import add_checkpoint_args as add_checkpoint_args, compose_from_args as compose_from_args
    from .state.paths import PerRank as PerRank

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".callers": "AsyncCaller AsyncCallsQueue AsyncRequest PersistentAsyncCaller TemporalAsyncCaller",
        ".checkpointer": "AsyncCheckpointer Checkpointer SyncCheckpointer",
        ".config": "compose_checkpoint",
        ".megatron.args": "add_checkpoint_args compose_from_args",
        ".factory.graph": "build_checkpointer build_manager instantiate_manager",
        ".state.paths": "PerRank",
        ".managing.manager": "CheckpointManager",
        ".factory.weights": "load_weights",
        ".compat": (
            "CheckpointProcess CheckpointProcessConfig CheckpointMetadataCache FileSystemWriterAsync "
            "save_state_dict_async_finalize save_state_dict_async_plan"
        ),
        ".events": "CheckpointListener LoadReport SaveReport",
        ".core.commit.run_record": "StoredConfig stored_config stored_metrics",
    },
)
__all__ += _errors.__all__
