"""A checkpoint manager for `checkpoint.custom_manager_class` of Megatron-Bridge.

    checkpoint:
      custom_manager_class: ckpt_component.megatron.bridge.Manager

Bridge accepts class names from a list of packages only; `ckpt_component.megatron.install()`, or running the script with
`python -m ckpt_component.megatron`, adds this package to the list.
"""

from __future__ import annotations

import logging
from typing import Any

try:
    from megatron.bridge.training.checkpointing import DefaultCheckpointManager
except ImportError as error:
    raise ImportError(
        f"ckpt_component.megatron.bridge needs Megatron-Bridge 0.6 or newer ({error}): pip install megatron-bridge"
    ) from error

from ..compat.async_queue import AsyncCallsQueue
from .installing import install

logger = logging.getLogger(__name__)


class Manager(DefaultCheckpointManager):  # type: ignore[misc, unused-ignore]
    """Bridge's own manager, whose saves run in the queue and writer of this package.

    Format, loading, and the options of `CheckpointConfig` are Bridge's.

    Args:
        checkpoint_config: Bridge's `CheckpointConfig`
    """

    def __init__(self, checkpoint_config: Any) -> None:
        install()
        super().__init__(checkpoint_config)

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save, asynchronously if the config says so. Call it on all ranks.

        Args:
            ctx: Bridge's `CheckpointSaveContext`
            callback_manager: Bridge's callbacks, or None

        Raises:
            RanksError: an earlier save failed; the same on all ranks
        """
        _use_our_queue(ctx.state)
        super().save(ctx, callback_manager)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finalize the saves that are done. Call it on all ranks.

        Args:
            state: Bridge's `GlobalState`
            blocking: wait for all saves
            terminate: also close the queue

        Raises:
            RanksError: a save failed; the same on all ranks
        """
        super().finalize_async_saves(state, blocking=blocking, terminate=terminate)


def _use_our_queue(state: Any) -> None:
    """Replace a queue that Bridge created before this package was installed."""
    queue = state.async_calls_queue
    if queue is None or isinstance(queue, AsyncCallsQueue):
        return
    logger.info("replacing the queue %s.%s of Megatron-Bridge", type(queue).__module__, type(queue).__qualname__)
    queue.close()  # it must not receive our requests: a worker of NVRx ignores those of other classes
    state._async_calls_queue = None
    state.initialize_async_checkpoint_worker()
