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
    from .core.commit.run_record import StoredConfig, stored_config, stored_metrics
    from .core.state.per_rank import PerRank
    from .events import CheckpointListener, LoadReport, SaveReport
    from .factory.graph import build_checkpointer, build_manager, instantiate_manager
    from .loading.weights import load_weights
    from .managing.manager import CheckpointManager
    from .megatron.args import add_checkpoint_args, compose_from_args

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".callers": "AsyncCaller AsyncCallsQueue AsyncRequest PersistentAsyncCaller TemporalAsyncCaller",
        ".checkpointer": "AsyncCheckpointer Checkpointer SyncCheckpointer",
        ".config": "compose_checkpoint",
        ".megatron.args": "add_checkpoint_args compose_from_args",
        ".factory.graph": "build_checkpointer build_manager instantiate_manager",
        ".core.state.per_rank": "PerRank",
        ".managing.manager": "CheckpointManager",
        ".loading.weights": "load_weights",
        ".compat": (
            "CheckpointProcess CheckpointProcessConfig CheckpointMetadataCache FileSystemWriterAsync "
            "save_state_dict_async_finalize save_state_dict_async_plan"
        ),
        ".events": "CheckpointListener LoadReport SaveReport",
        ".core.commit.run_record": "StoredConfig stored_config stored_metrics",
    },
)
__all__ += _errors.__all__

# Documented modules that have moved can be imported under their old names: they stand in this folder.
__path__.append(os.path.join(os.path.dirname(__file__), "_old_names"))  # noqa: F405
