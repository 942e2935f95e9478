"""Rows of torch itself."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from .saver import SECONDS, Saver, copy_into
from .states import State


class TorchSave(Saver):
    """`torch.save`, and `torch.load` with `mmap`, its fastest."""

    def save(self, path: str) -> None:
        """See `Saver`."""
        torch.save(self.state, path)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        copy_into(target, torch.load(path, map_location="cpu", mmap=True, weights_only=True))


class Dcp(Saver):
    """`dcp.save`, in the format of which others have variants.

    Args:
        state: see `Saver`
        threads: of the writer
    """

    def __init__(self, state: State, threads: int = 1) -> None:
        super().__init__(state)
        self._threads = threads

    def save(self, path: str) -> None:
        """See `Saver`."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, storage_writer=self.writer(path))

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        import torch.distributed.checkpoint as dcp

        dcp.load(target, checkpoint_id=path)

    def writer(self, path: str) -> Any:
        """Stock's writer, which syncs its files."""
        import torch.distributed.checkpoint as dcp

        return dcp.FileSystemWriter(path, thread_count=self._threads)


class DcpAsync(Dcp):
    """`dcp.async_save` from a thread or from a process, as it is by default.

    Args:
        state: see `Saver`
        kind: `thread` or `process`
    """

    def __init__(self, state: State, kind: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(state)
        self._kind = AsyncCheckpointerType(kind)
        # The process executor needs a process group, and a name that it can meet itself under.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self, path: str) -> None:
        """See `Saver`."""
        import torch.distributed.checkpoint as dcp

        done: Any = dcp.async_save(self.state, storage_writer=self.writer(path), async_checkpointer_type=self._kind)
        self.written = done

    def close(self) -> None:
        """See `Saver`."""
        dist.destroy_process_group()


class Experimental(Saver):
    """torch's experimental asynchronous checkpointer, with what works without a GPU: staging through shared memory."""

    def __init__(self, state: State) -> None:
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

        super().__init__(state)
        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._checkpointer = make_async_checkpointer(CheckpointerConfig(staging_config=staging))
        self._staged: Future[Any] | None = None

    def save(self, path: str) -> None:
        """See `Saver`."""
        self._staged, self.written = self._checkpointer.save(path, self.state) or (None, None)

    def wait_staged(self) -> None:
        """See `Saver`."""
        if self._staged is not None:
            self._staged.result(SECONDS)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        self._checkpointer.load(path, target)

    def close(self) -> None:
        """See `Saver`."""
        self._checkpointer.close()
