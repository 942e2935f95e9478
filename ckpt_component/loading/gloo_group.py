"""`GlooGroup`: a process group in which all ranks pass bytes on: the only use of `torch.distributed` in a load.

It is one of its own: what goes wrong in it does not end the connections of the program's groups.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch

#: The tag of a message that is never sent.
_NEVER = (1 << 31) - 1


class GlooGroup:
    """See the top of this file. All ranks make one at the same time.

    Args:
        dist: `torch.distributed`, or what `Outside.distributed` has in its place
        rank: this rank
        world_size: number of ranks
        seconds: that making it may last, and a call of `gather`

    Raises:
        RuntimeError, ValueError: it cannot be made; or from a method: a connection has ended, or it takes too long
    """

    def __init__(self, dist: Any, rank: int, world_size: int, seconds: float) -> None:
        self._dist, self._rank, self._world_size = dist, rank, world_size
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def send(self, message: torch.Tensor, to: int, number: int) -> Any:
        """Begin to send a message with a number; returns the work, which has its memory."""
        return self._dist.isend(message, to, group=self._group, tag=number)

    def receive(self, message: torch.Tensor, sender: int, number: int) -> Any:
        """Begin to receive one; returns the work."""
        return self._dist.irecv(message, sender, group=self._group, tag=number)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        found: list[Any] = [None] * self._world_size
        self._dist.all_gather_object(found, value, group=self._group)
        return found

    def close(self) -> None:
        """End all that still waits for something in it."""
        # A wait that takes too long closes all connections of a group; nothing else ends a wait for a rank that hangs.
        byte = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError, ValueError):
            work = self.receive(byte, (self._rank + 1) % self._world_size, _NEVER)
            work.wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError, ValueError):  # the program has destroyed all groups
            self._dist.destroy_process_group(self._group)
