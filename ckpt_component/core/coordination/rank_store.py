"""A rank's connection to the store that all ranks share: small messages, and a deadline on every call and wait.

It uses neither collectives nor devices.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CheckpointError, CheckpointTimeoutError, RanksError
from .connection import MadeHere, StoreConnection, is_held, is_held_by_agent
from .coordinator import distributed

#: Polling intervals in seconds: the first, its minimum per rank (the store answers about 100,000 requests a second),
#: and the longest.
_FIRST_POLL, _FIRST_POLL_PER_RANK, _LONGEST_POLL = 0.001, 5e-5, 0.2
#: Seconds after which a call fails that the store does not answer.
_ANSWER_SECONDS = 30.0


class RankStore:
    """Keys and values shared by all ranks. One object per thread: a connection serves one call at a time.

    Args:
        store: a `torch.distributed` store, used by this object only; or a connection
        rank: this rank
        world_size: number of ranks
        prefix: prefix of all keys; the same on all ranks, and used for one purpose only
        deadline: monotonic seconds for all calls; see `until`

    Attributes:
        outside: that of the connection, by which all waits for other ranks go
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str, deadline: float = math.inf) -> None:
        is_connection = isinstance(store, (StoreConnection, MadeHere))
        self._connection = store if is_connection else StoreConnection(store, _ANSWER_SECONDS, opens=False)
        self.outside = self._connection.outside
        self.rank = rank
        self.world_size = world_size
        self._prefix = prefix
        self._deadline = deadline

    @classmethod
    def of_job(cls, purpose: str, timeout: float = _ANSWER_SECONDS) -> RankStore | None:
        """Connect to the store of the default process group; None with one rank.

        All ranks must call this in the same order for the same purpose: the n-th calls of all ranks share their keys.

        Args:
            purpose: distinguishes the keys from others of the job
            timeout: seconds after which a call fails that the store does not answer

        Raises:
            RanksError: the store is unreachable or does not answer
        """
        store = cls.shared(purpose, timeout)
        return None if store is None else store.own()

    @classmethod
    def shared(cls, purpose: str, timeout: float = _ANSWER_SECONDS) -> RankStore | None:
        """Like `of_job`, but all connections for this purpose share their keys, in whatever order they are made."""
        dist = distributed()
        if dist is None or dist.get_world_size() == 1:
            return None
        rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
        return cls.of_group(rank, world_size, f"{world_size}/{purpose}", timeout)

    @classmethod
    def of_group(cls, rank: int, world_size: int, purpose: str, timeout: float = _ANSWER_SECONDS) -> RankStore:
        """Like `shared`, for the ranks of a process group.

        Args:
            rank: this rank in the group
            world_size: number of its ranks
            purpose: distinguishes the keys from others of the job, and those of the group from those of other groups
            timeout: seconds after which a call fails that the store does not answer
        """
        store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
        # An agent's store outlives a restart of its ranks. The agents of several hosts may count restarts differently:
        # one that took the place of another begins at 0.
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_held_by_agent() else "0"
        connection = StoreConnection(store, timeout, opens=True)
        return cls(connection, rank, world_size, f"ckpt/{generation}/{purpose}/")

    def own(self) -> RankStore:
        """Return the same connection with other keys; the n-th calls of all ranks share their keys."""
        number = self.add(f"made-by-{self.rank}", 1)
        return RankStore(self._connection, self.rank, self.world_size, f"{self._prefix}{number}/")

    def clone(self) -> RankStore:
        """Return a new connection to the same keys, for another thread. It is opened with its first call."""
        return self._over(self._connection.another())

    def until(self, deadline: float) -> RankStore:
        """Return the same connection with a deadline for its calls, in monotonic seconds."""
        return self._over(self._connection, deadline)

    @property
    def is_blocked(self) -> bool:
        """Whether the store has not answered a call that was given up, so that further calls wait for it."""
        return self._connection.is_blocked

    def once_answered(self, action: Callable[[RankStore], None]) -> None:
        """Let a blocked connection do something as soon as the store answers again. Does not wait."""
        self._connection.call_later(lambda store: action(self._over(MadeHere(store, self.outside))))

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            RanksError: the store is unreachable or has not answered for the timeout; as do all methods here
            CheckpointTimeoutError: it did not answer until the deadline; as do all methods here
        """
        self._call(lambda store: store.set(self._prefix + key, value), repeatable=True)

    def add(self, key: str, amount: int, *, repeatable: bool = False) -> int:
        """Add to a counter, which starts at 0, and return its new value. An amount of 0 reads it.

        If the connection breaks, a `repeatable` addition may be made twice, and another one not at all.
        """
        return int(
            self._call(lambda store: store.add(self._prefix + key, amount), repeatable=repeatable or amount == 0)
        )

    def is_held(self) -> bool:
        """Whether the process of the store is still there. torch prints a stack of other calls to one that is not."""
        return bool(self._call(lambda store: is_held(store, self.outside), repeatable=True))

    def peek(self, key: str) -> bytes | None:
        """Return the value, or None if there is none yet. Does not wait."""
        full_key = self._prefix + key

        def look(store: Any) -> bytes | None:
            return bytes(store.get(full_key)) if store.check([full_key]) else None

        found: bytes | None = self._call(look, repeatable=True)
        return found

    def has(self, key: str) -> bool:
        """Whether a key has a value. Does not read it."""
        return bool(self._call(lambda store: store.check([self._prefix + key]), repeatable=True))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        if not keys:
            return []
        names = [self._prefix + key for key in keys]
        return [bytes(value) for value in self._call(lambda store: store.multi_get(names), repeatable=True)]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, whether or not they exist."""
        names = [self._prefix + key for key in keys]
        self._call(lambda store: [store.delete_key(name) for name in names], repeatable=True)

    def wait_until(self, ready: Callable[[], bool], deadline: float, what: Callable[[], str]) -> None:
        """Wait until `ready()` returns True.

        Args:
            ready: polled; must be quick
            deadline: monotonic seconds
            what: describes what is missing, for the error, and where long waits are shown

        Raises:
            CheckpointTimeoutError: it returned False until the deadline; the text says what was missing
        """
        if ready():
            return
        pause = max(_FIRST_POLL, _FIRST_POLL_PER_RANK * self.world_size)
        with self.outside.waits.on(what, deadline) as wait:
            while True:
                remaining = deadline - self.outside.now()
                if remaining <= 0:
                    raise CheckpointTimeoutError(f"Timed out waiting for {what()}.")
                wait.look()
                self.outside.sleep(min(pause, remaining))
                if ready():
                    return
                pause = min(pause * 1.5, max(_LONGEST_POLL, pause))

    def _over(self, connection: StoreConnection | MadeHere, deadline: float = math.inf) -> RankStore:
        return RankStore(connection, self.rank, self.world_size, self._prefix, deadline)

    def _call(self, function: Callable[[Any], Any], *, repeatable: bool) -> Any:
        try:
            return self._connection.call(function, self._deadline, repeatable=repeatable)
        except CheckpointError:
            raise
        except RuntimeError as error:  # all errors of torch's stores are RuntimeErrors
            raise RanksError(
                f"Rank {self.rank} cannot reach the store that all {self.world_size} ranks share; its connection to "
                f"{self._connection.holder()} broke, or it has ended: {str(error).splitlines()[0]}"
            ) from error
