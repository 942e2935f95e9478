"""Stands for gloo between ranks that are threads of one process, where ranks pass on what they read."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

from ckpt_component.core.state.dense_tensors import tensor_bytes
from ckpt_component.loading import messages, read_once

_SECONDS = 20.0


@dataclass
class Member:
    """A rank's side of the group of all ranks."""

    gloo: ThreadGloo
    rank: int


class ThreadGloo:
    """The calls of `torch.distributed` that a load makes. A rank is told by the thread that calls `of`.

    Args:
        world_size: how many ranks there are

    Attributes:
        flips: whether a bit of each message flips on its way
    """

    def __init__(self, world_size: int) -> None:
        self.flips = False
        self._world_size = world_size
        self._own = threading.local()
        self._ways: dict[tuple[int, int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()
        self._values: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=_SECONDS)

    def of(self, rank: int) -> None:
        """This thread is that of a rank."""
        self._own.rank = rank

    def get_world_size(self) -> int:
        return self._world_size

    def new_group(self, backend: str, timeout: timedelta) -> Member:
        return Member(self, self._own.rank)

    def destroy_process_group(self, group: Member) -> None:
        pass

    def all_gather_object(self, found: list[Any], value: Any, group: Member) -> None:
        self._values[group.rank] = value
        self._barrier.wait()
        found[:] = self._values
        self._barrier.wait()

    def isend(self, tensor: torch.Tensor, to: int, group: Member, tag: int) -> _Work:
        data = bytearray(tensor_bytes(tensor))
        data[len(data) // 2] ^= 4 * self.flips
        self._way(group.rank, to, tag).put(bytes(data))
        return _Work()

    def irecv(self, tensor: torch.Tensor, source: int, group: Member, tag: int) -> _Work:
        return _Work(self._way(source, group.rank, tag), tensor)

    def _way(self, source: int, to: int, tag: int) -> queue.Queue[bytes]:
        with self._lock:
            return self._ways[source, to, tag]


@dataclass
class _Work:
    way: queue.Queue[bytes] | None = None
    tensor: torch.Tensor | None = None

    def wait(self, timeout: timedelta) -> None:
        if self.way is not None and self.tensor is not None:
            try:
                data = self.way.get(timeout=min(timeout.total_seconds(), _SECONDS))
            except queue.Empty as error:
                raise RuntimeError("Timed out waiting for an operation") from error
            tensor_bytes(self.tensor)[:] = data


@contextmanager
def reading_together(world_size: int) -> Iterator[ThreadGloo]:
    """Inside the block, ranks are on hosts of their own, and read together over this."""
    gloo, numbers = ThreadGloo(world_size), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, read_once):
            patch.setattr(module, "dist", gloo)
        patch.setattr(read_once, "distributed", lambda: gloo)
        patch.setattr(read_once, "host_name", lambda: f"host{next(numbers)}")
        yield gloo
