"""NVIDIA's resiliency extension, without a GPU.

It calls `torch.cuda.synchronize` wherever it waits for copies; here there is nothing to wait for, and the call is
replaced by one that does nothing, in the worker too. Status is asked with `no_dist`, as the all-reduce is CUDA's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .saver import Saver
from .states import State
from .torch_rows import Dcp, TorchSave


def _do_nothing(*_: Any) -> None:
    """What `torch.cuda.synchronize` is without a GPU."""


def stub_cuda() -> None:
    """Let calls of `torch.cuda.synchronize` pass on a machine without CUDA."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _do_nothing  # type: ignore[assignment]


def preload_stubbed(preload: Callable[[], Any]) -> Any:
    """NVRx's preload function, in the worker, which needs its own setting."""
    stub_cuda()
    return preload()


class _Nvrx(Saver):
    def __init__(self, state: State, clone: bool) -> None:
        super().__init__(state)
        # At every save of the temporal caller it warns that this caller will be deprecated.
        logging.getLogger("nvidia_resiliency_ext").setLevel(logging.ERROR)
        stub_cuda()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._clone = clone

    def _snapshot(self) -> State:
        # It takes tensors on the CPU as they are, so that the next update is in the file: the copy is the caller's.
        return {key: tensor.clone() for key, tensor in self.state.items()} if self._clone else self.state

    def close(self) -> None:
        dist.destroy_process_group()


class NvrxTorchSave(_Nvrx):
    """`TorchAsyncCheckpoint`: `torch.save` from a persistent worker or from a fork.

    Args:
        state: see `Saver`
        persistent: the worker
        clone: copy the state before
    """

    def __init__(self, state: State, persistent: bool, clone: bool = False) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import (  # type: ignore[import-not-found]
            TorchAsyncCheckpoint,
        )

        super().__init__(state, clone)
        self._saver = TorchAsyncCheckpoint(persistent_queue=persistent)

    def save(self, path: str) -> None:
        """See `Saver`."""
        self._saver.async_save(self._snapshot(), path)

    def poll(self) -> bool:
        """See `Saver`."""
        self._saver.finalize_async_save(blocking=False, no_dist=True)
        return int(self._saver._async_calls_queue.get_num_unfinalized_calls()) == 0

    def finish(self) -> None:
        """See `Saver`."""
        self._saver.finalize_async_save(blocking=True, no_dist=True)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        TorchSave(self.state).load(path, target)

    def close(self) -> None:
        """See `Saver`."""
        self._saver.finalize_async_save(blocking=True, no_dist=True, terminate=True)
        super().close()


class NvrxDcp(_Nvrx):
    """`FileSystemWriterAsync` and the queue, as Megatron uses them, with the cache of plans.

    Args:
        state: see `Saver`
        persistent: one worker for all saves; False: a fork per save, which writes with two processes
        clone: copy the state before
    """

    def __init__(self, state: State, persistent: bool, clone: bool = False) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (  # type: ignore[import-not-found]
            AsyncCallsQueue,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (  # type: ignore[import-not-found]
            CheckpointMetadataCache,
        )

        super().__init__(state, clone)
        self._queue = AsyncCallsQueue(persistent=persistent)
        self._cache = CheckpointMetadataCache()
        self._threads = 1 if persistent else 2

    def save(self, path: str) -> None:
        """See `Saver`."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (  # type: ignore[import-not-found]
            FileSystemWriterAsync,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        writer = FileSystemWriterAsync(path, thread_count=self._threads)
        planned = save_state_dict_async_plan(self._snapshot(), writer, enable_cache=True, metadata_cache=self._cache)
        write, preload, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(
            write,
            tuple(arguments),
            [partial(save_state_dict_async_finalize, *planned)],
            preload_fn=partial(preload_stubbed, preload),
        )
        self._queue.schedule_async_request(request)

    def poll(self) -> bool:
        """See `Saver`."""
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return int(self._queue.get_num_unfinalized_calls()) == 0

    def finish(self) -> None:
        """See `Saver`."""
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        Dcp(self.state).load(path, target)

    def close(self) -> None:
        """See `Saver`."""
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        if self._queue.persistent_caller is not None:
            self._queue.persistent_caller.close()
        super().close()
