"""A connection to the store that counts its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Heartbeats go on between saves and are not counted.
_BEAT = "beat/"


@dataclass(frozen=True)
class Counts:
    """What went over a connection so far.

    Attributes:
        messages: calls that change something.
        looks: calls that ask.
        bytes_read: of values.
    """

    messages: int = 0
    looks: int = 0
    bytes_read: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.messages + other.messages, self.looks + other.looks, self.bytes_read + other.bytes_read)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.messages - other.messages, self.looks - other.looks, self.bytes_read - other.bytes_read)


class CountedConnection:
    """Stands in for a store, on one thread beside that of the heartbeat. Its clones are itself.

    Connecting looks names up, which takes seconds now and then where no name server answers; so many ranks share one.

    Args:
        store: what is asked; it may be shared.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._messages = self._looks = self._bytes_read = 0

    def counts(self) -> Counts:
        """So far."""
        return Counts(self._messages, self._looks, self._bytes_read)

    def clone(self) -> CountedConnection:
        """Itself."""
        return self

    def set(self, key: str, value: bytes) -> None:
        """See `torch.distributed.Store`, as for all others here."""
        self._messages += _BEAT not in key
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """An amount of 0 is a look."""
        self._messages += amount != 0
        self._looks += amount == 0
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """A message."""
        self._messages += 1
        return bool(self._store.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """A look."""
        self._looks += 1
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """A look."""
        return self._read([bytes(self._store.get(key))])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """One look at many keys."""
        return self._read([bytes(value) for value in self._store.multi_get(list(keys))])

    def _read(self, values: list[bytes]) -> list[bytes]:
        self._looks += 1
        self._bytes_read += sum(map(len, values))
        return values
