"""Stands for gloo between ranks that are threads of one process, where ranks pass on what they read."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from outsides import OnHost

from ckpt_component.core.state.dense_tensors import tensor_bytes

_SECONDS, _POLL_SECONDS = 20.0, 0.01


@dataclass
class Member:
    """A rank's side of a group of all ranks.

    Attributes:
        rank: the rank
        ways: the messages of the group that were sent, by sender, receiver and tag
        closed: set when a rank waited too long, as gloo closes all connections then
    """

    rank: int
    ways: dict[tuple[int, int, int], queue.Queue[bytes]]
    closed: threading.Event


class ThreadGloo:
    """The calls of `torch.distributed` that a load makes. A rank is known by the thread that calls `of`.

    Args:
        world_size: how many ranks there are

    Attributes:
        flips: whether a bit of each message flips on its way
        silent: a rank whose messages do not arrive
    """

    def __init__(self, world_size: int) -> None:
        self.flips, self.silent = False, -1
        self.group = SimpleNamespace(WORLD=self)
        self._world_size = world_size
        self._own = threading.local()
        self._groups: dict[int, tuple[dict[tuple[int, int, int], queue.Queue[bytes]], threading.Event]] = {}
        self._made: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._values: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=_SECONDS)

    def of(self, rank: int) -> None:
        """This thread is that of a rank."""
        self._own.rank = rank

    def get_world_size(self) -> int:
        return self._world_size

    def new_group(self, backend: str, timeout: timedelta) -> Member:
        with self._lock:
            self._made[self._own.rank] += 1
            made = self._groups.setdefault(self._made[self._own.rank], (defaultdict(queue.Queue), threading.Event()))
            return Member(self._own.rank, *made)

    def destroy_process_group(self, group: Member) -> None:
        group.closed.set()

    def all_gather_object(self, found: list[Any], value: Any, group: Member) -> None:
        self._values[group.rank] = value
        self._barrier.wait()
        found[:] = self._values
        self._barrier.wait()

    def isend(self, tensor: torch.Tensor, to: int, group: Member, tag: int) -> _Work:
        data = bytearray(tensor_bytes(tensor))
        data[len(data) // 2] ^= 4 * self.flips
        if group.rank != self.silent:
            self._way(group, group.rank, to, tag).put(bytes(data))
        return _Work(group)

    def irecv(self, tensor: torch.Tensor, source: int, group: Member, tag: int) -> _Work:
        return _Work(group, self._way(group, source, group.rank, tag), tensor)

    def _way(self, group: Member, source: int, to: int, tag: int) -> queue.Queue[bytes]:
        with self._lock:
            return group.ways[source, to, tag]


@dataclass
class _Work:
    group: Member
    way: queue.Queue[bytes] | None = None
    tensor: torch.Tensor | None = None

    def wait(self, timeout: timedelta) -> None:
        if self.way is None or self.tensor is None:
            return
        until = time.monotonic() + min(timeout.total_seconds(), _SECONDS)
        while not self.group.closed.is_set():
            try:
                data = self.way.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() > until:
                    self.group.closed.set()
                continue
            view = tensor_bytes(self.tensor)
            assert len(data) == view.nbytes, "gloo would end the process"
            view[:] = data
            return
        raise RuntimeError("Connection closed by peer")


class Reading(OnHost):
    """A rank on a host, which reads together with others over this."""

    def __init__(self, host: str, gloo: ThreadGloo) -> None:
        super().__init__(host)
        self._gloo = gloo

    def distributed(self) -> ThreadGloo:
        return self._gloo
