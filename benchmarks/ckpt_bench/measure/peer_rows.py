"""Rows of separate packages: safetensors, torch_checkpointing, torchsnapshot."""

from __future__ import annotations

from typing import Any

from .saver import Saver, copy_into
from .states import State

_ITEM = "state"


class Safetensors(Saver):
    """`save_file` and `safe_open`."""

    def save(self, path: str) -> None:
        """See `Saver`."""
        from safetensors.torch import save_file

        save_file(self.state, path)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for key, tensor in target.items():
                tensor.copy_(file.get_tensor(key))


class TorchCheckpointing(Saver):
    """`torch_checkpointing.CheckpointManager`, asynchronous as it is by default, the whole state as one item.

    Direct I/O is off: its default writes through a buffered file object, which ext4 refuses with EINVAL.
    """

    def __init__(self, state: State) -> None:
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
        from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found]
            LocalFileSystemStorageConfig,
        )

        super().__init__(state)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager.Config(storage_config=storage).build()

    def save(self, path: str) -> None:
        """See `Saver`."""
        self.written = self._manager.save(path, {_ITEM: self.state})

    def wait_staged(self) -> None:
        """See `Saver`."""
        with self._manager.lock():
            pass

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        copy_into(target, self._manager.load(path, {_ITEM: target}, strict=True)[_ITEM])

    def close(self) -> None:
        """See `Saver`."""
        self._manager.close()


class Torchsnapshot(Saver):
    """`Snapshot.take` or `Snapshot.async_take`.

    Args:
        state: see `Saver`
        in_background: the second of them
    """

    def __init__(self, state: State, in_background: bool) -> None:
        from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found]

        super().__init__(state)
        self._snapshot, self._wrap = Snapshot, StateDict
        self._in_background = in_background
        self._pending: Any = None

    def save(self, path: str) -> None:
        """See `Saver`."""
        app_state = {_ITEM: self._wrap(**self.state)}
        if self._in_background:
            self._pending = self._snapshot.async_take(path, app_state)
        else:
            self._snapshot.take(path, app_state)

    def poll(self) -> bool:
        """See `Saver`."""
        return self._pending is None or bool(self._pending.done())

    def finish(self) -> None:
        """See `Saver`."""
        if self._pending is not None:
            self._pending.wait()

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        restored = self._wrap(**target)
        self._snapshot(path).restore({_ITEM: restored})
        copy_into(target, restored)
