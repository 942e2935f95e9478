"""Messages between ranks: each has what a rank wants of a batch, and says at its end whether that was read.

Their memory is used again and again, as fresh memory costs about as much as what it is for: each page is cleared first.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from ..core.memory.libc import memory_at
from ..core.state.dense_tensors import tensor_bytes
from ..core.storage.checksum import Checksum
from ..core.storage.space import amount
from .gloo_group import GlooGroup

logger = logging.getLogger("ckpt_component.readers")

#: At the end of a message: whether its bytes were read, and their checksum.
_TRAILER = struct.Struct("<?Q")


class Messages:
    """What this rank sends to others and gets from them, over gloo. Thread-safe.

    Args:
        rank: this rank
        group: of all ranks
        checksum: of every message, for bytes that nothing else verifies; None: who takes them verifies them
        most_bytes: of a batch
        lasts: seconds that one message may last
    """

    def __init__(self, rank: int, group: GlooGroup, checksum: Checksum | None, most_bytes: int, lasts: float) -> None:
        self._rank, self._group, self._checksum, self._most_bytes = rank, group, checksum, most_bytes
        self._lasts = timedelta(seconds=lasts)
        #: Memory that nobody has a view of now.
        self._free: deque[torch.Tensor] = deque()

    def blank(self, nbytes: int) -> torch.Tensor:
        """Memory for a message of so many bytes, which says that they were not read."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._most_bytes + _TRAILER.size, dtype=torch.uint8, device="cpu")
        lease = _Lease()
        weakref.finalize(lease, self._free.append, memory).atexit = False
        message = torch.frombuffer(memory_at(memory.data_ptr(), nbytes + _TRAILER.size, lease), dtype=torch.uint8)
        message[nbytes:] = 0
        return message

    def seal(self, message: torch.Tensor) -> None:
        """Say that the bytes of a message are there."""
        view = tensor_bytes(message)
        checksum = 0 if self._checksum is None else self._checksum.of(view[: -_TRAILER.size])
        _TRAILER.pack_into(view, view.nbytes - _TRAILER.size, True, checksum)

    def part(self, message: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
        """A message of some of the bytes of another one."""
        part = self.blank(sum(end - start for start, end in places))
        torch.cat([message[start:end] for start, end in places], out=part[: -_TRAILER.size])
        if bool(message[-_TRAILER.size]):  # it was read
            self.seal(part)
        return part

    def content(self, message: torch.Tensor, sender: int) -> memoryview | None:
        """The bytes of a message; None if they were not read, or are not as they were sent."""
        view = tensor_bytes(message)
        data = view[: -_TRAILER.size]
        is_read, checksum = _TRAILER.unpack(view[-_TRAILER.size :])
        if not is_read:
            return None
        if self._checksum is None or sender == self._rank or self._checksum.of(data) == checksum:
            return data
        logger.warning("%s that rank %d sent came damaged, and is read from storage", amount(data.nbytes), sender)
        return None

    def send(self, message: torch.Tensor, to: int, number: int) -> Any:
        """Begin to send the message with a batch, by its number; returns the work, which has its memory.

        Raises:
            RuntimeError, ValueError: the connection has ended
        """
        return self._group.send(message, to, number)

    def receive(self, nbytes: int, sender: int, number: int) -> torch.Tensor:
        """Wait for the message with a batch, of so many bytes.

        Raises:
            RuntimeError, ValueError: the connection has ended, or it takes too long
        """
        message = self.blank(nbytes)
        self.wait(self._group.receive(message, sender, number))
        return message

    def wait(self, work: Any) -> None:
        """Wait until a message has arrived; raises as `receive`."""
        work.wait(self._lasts)


class _Lease:
    """Lives as long as somebody has a view of a message's memory."""
