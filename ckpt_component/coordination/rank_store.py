"""One rank's connection to the store that all ranks share: small messages, and every wait has a deadline.

Nothing here is a collective, and nothing touches a device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..errors import CheckpointTimeoutError, RanksError
from .coordinator import distributed

#: A wait looks this often at first (seconds), and ever more seldom. With many ranks more seldom from the beginning: the
#: store answers about 100,000 times a second.
_FIRST_POLL, _FIRST_POLL_PER_RANK, _LONGEST_POLL = 0.001, 5e-5, 0.2


class RankStore:
    """Keys and values that all ranks see. One object per thread: a connection serves one call at a time.

    Args:
        store: a `torch.distributed` store of this rank's own.
        rank: this one.
        world_size: how many there are.
        prefix: of all keys; the same on all ranks, and used by one purpose alone.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._prefix = prefix

    @classmethod
    def of_job(cls, purpose: str) -> RankStore | None:
        """A connection of its own to the store of the default process group; None where there is one rank.

        All ranks must call this in the same order for the same purpose: the n-th call of each rank belongs together.
        """
        store = cls.shared(purpose)
        return None if store is None else store.own()

    @classmethod
    def shared(cls, purpose: str) -> RankStore | None:
        """As `of_job`, with keys that all such connections for this purpose share; in any order."""
        dist = distributed()
        if dist is None or dist.get_world_size() == 1:
            return None
        rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
        store = another_connection(dist, dist.distributed_c10d._get_default_store())
        # An agent's store outlives a restart of its workers, so keys carry the generation too.
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(store, rank, world_size, f"ckpt/{generation}/{world_size}/{purpose}/")

    def own(self) -> RankStore:
        """The same connection with other keys; the n-th call of each rank belongs together."""
        number = self.add(f"made-by-{self.rank}", 1)
        return RankStore(self._store, self.rank, self.world_size, f"{self._prefix}{number}/")

    def clone(self) -> RankStore:
        """The same keys by another connection, for another thread."""
        store = self._call(lambda: another_connection(sys.modules["torch.distributed"], self._store))
        return RankStore(store, self.rank, self.world_size, self._prefix)

    def set(self, key: str, value: bytes) -> None:
        """Put a value in. Raises RanksError when the store is unreachable; so do all others here."""
        self._call(lambda: self._store.set(self._prefix + key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns its new value. An amount of 0 reads it."""
        return int(self._call(lambda: self._store.add(self._prefix + key, amount)))

    def peek(self, key: str) -> bytes | None:
        """The value, or None while there is none. Never waits for it."""
        there = self._prefix + key
        return self._call(lambda: bytes(self._store.get(there)) if self._store.check([there]) else None)

    def has(self, key: str) -> bool:
        """Whether a value is there, without reading it."""
        return bool(self._call(lambda: self._store.check([self._prefix + key])))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        if not keys:
            return []
        return [bytes(value) for value in self._call(lambda: self._store.multi_get([self._prefix + k for k in keys]))]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, whether they are there or not."""
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(self._prefix + key))  # type: ignore[misc]

    def wait_until(self, ready: Callable[[], bool], deadline: float, what: Callable[[], str]) -> None:
        """Return when `ready()` says so.

        Args:
            ready: asked again and again; a quick look.
            deadline: monotonic seconds.
            what: names what is missing, for the error.

        Raises:
            CheckpointTimeoutError: it did not in time; the text says what was missing.
        """
        pause = max(_FIRST_POLL, _FIRST_POLL_PER_RANK * self.world_size)
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise CheckpointTimeoutError(f"Timed out waiting for {what()}.")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, max(_LONGEST_POLL, pause))

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # all errors of torch's stores are RuntimeErrors
            raise RanksError(
                f"Rank {self.rank} cannot reach the store that all {self.world_size} ranks share; the process that "
                f"holds it, rank 0 or torchrun, is gone: {str(error).splitlines()[0]}"
            ) from error


def another_connection(dist: ModuleType, store: Any) -> Any:
    """A new connection to the same store; torch 2.7 has no `clone` for that.

    Args:
        dist: `torch.distributed`.
        store: one of its stores, in use elsewhere.

    Raises:
        RanksError: the store is of a kind to which this torch makes no second connection.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, None, False, wait_for_workers=False)
    raise RanksError(
        f"The ranks share a {type(store).__name__}, to which this torch makes no second connection; initialize "
        "torch.distributed by env:// or tcp://, or use a newer torch."
    )
