"""A rank's connection to the store that all ranks share: small messages, and a deadline on every wait.

It uses neither collectives nor devices.
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

#: Polling intervals in seconds: the first, its minimum per rank (the store answers about 100,000 requests a second),
#: and the longest.
_FIRST_POLL, _FIRST_POLL_PER_RANK, _LONGEST_POLL = 0.001, 5e-5, 0.2


class RankStore:
    """Keys and values shared by all ranks. One object per thread: a connection serves one call at a time.

    Args:
        store: a `torch.distributed` store, used by this object only.
        rank: this rank.
        world_size: number of ranks.
        prefix: prefix of all keys; the same on all ranks, and used for one purpose only.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._prefix = prefix

    @classmethod
    def of_job(cls, purpose: str) -> RankStore | None:
        """Connect to the store of the default process group; None with one rank.

        All ranks must call this in the same order for the same purpose: the n-th calls of all ranks share their keys.
        """
        store = cls.shared(purpose)
        return None if store is None else store.own()

    @classmethod
    def shared(cls, purpose: str) -> RankStore | None:
        """Like `of_job`, but all connections for this purpose share their keys, in whatever order they are made."""
        dist = distributed()
        if dist is None or dist.get_world_size() == 1:
            return None
        rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
        store = another_connection(dist, dist.distributed_c10d._get_default_store())
        # An elastic agent's store outlives a restart of its workers, so keys include the restart count.
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(store, rank, world_size, f"ckpt/{generation}/{world_size}/{purpose}/")

    def own(self) -> RankStore:
        """Return the same connection with other keys; the n-th calls of all ranks share their keys."""
        number = self.add(f"made-by-{self.rank}", 1)
        return RankStore(self._store, self.rank, self.world_size, f"{self._prefix}{number}/")

    def clone(self) -> RankStore:
        """Return a new connection to the same keys, for another thread."""
        store = self._call(lambda: another_connection(sys.modules["torch.distributed"], self._store))
        return RankStore(store, self.rank, self.world_size, self._prefix)

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises RanksError if the store is unreachable, as do all methods here."""
        self._call(lambda: self._store.set(self._prefix + key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value. An amount of 0 reads it."""
        return int(self._call(lambda: self._store.add(self._prefix + key, amount)))

    def peek(self, key: str) -> bytes | None:
        """Return the value, or None if there is none yet. Does not wait."""
        full_key = self._prefix + key
        return self._call(lambda: bytes(self._store.get(full_key)) if self._store.check([full_key]) else None)

    def has(self, key: str) -> bool:
        """Whether a key has a value. Does not read it."""
        return bool(self._call(lambda: self._store.check([self._prefix + key])))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        if not keys:
            return []
        return [bytes(value) for value in self._call(lambda: self._store.multi_get([self._prefix + k for k in keys]))]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, whether or not they exist."""
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(self._prefix + key))  # type: ignore[misc]

    def wait_until(self, ready: Callable[[], bool], deadline: float, what: Callable[[], str]) -> None:
        """Wait until `ready()` returns True.

        Args:
            ready: polled; must be quick.
            deadline: monotonic seconds.
            what: describes what is missing, for the error.

        Raises:
            CheckpointTimeoutError: it returned False until the deadline; the text says what was missing.
        """
        pause = max(_FIRST_POLL, _FIRST_POLL_PER_RANK * self.world_size)
        while not ready():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise CheckpointTimeoutError(f"Timed out waiting for {what()}.")
            time.sleep(min(pause, remaining))
            pause = min(pause * 1.5, max(_LONGEST_POLL, pause))

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # all errors of torch's stores are RuntimeErrors
            raise RanksError(
                f"Rank {self.rank} cannot reach the store that all {self.world_size} ranks share; the process that "
                f"holds it, rank 0 or torchrun, has ended: {str(error).splitlines()[0]}"
            ) from error


def another_connection(dist: ModuleType, store: Any) -> Any:
    """Open a new connection to the same store; stores of torch 2.7 have no `clone`.

    Args:
        dist: `torch.distributed`.
        store: one of its stores, in use elsewhere.

    Raises:
        RanksError: this torch cannot open a second connection to a store of this kind.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, None, False, wait_for_workers=False)
    raise RanksError(
        f"The ranks share a {type(store).__name__}, to which this torch cannot open a second connection; "
        "initialize torch.distributed by env:// or tcp://, or use a newer torch."
    )
