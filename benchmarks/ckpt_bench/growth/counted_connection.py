"""A connection to the store that counts its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Heartbeats also happen between saves and are not counted.
_BEAT = "beat/"


@dataclass(frozen=True)
class Counts:
    """Traffic of a connection so far.

    Attributes:
        messages: calls that change the store
        looks: calls that read it
        bytes_read: total size of the values read
    """

    messages: int = 0
    looks: int = 0
    bytes_read: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.messages + other.messages, self.looks + other.looks, self.bytes_read + other.bytes_read)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.messages - other.messages, self.looks - other.looks, self.bytes_read - other.bytes_read)


class CountedConnection:
    """A store that counts its calls. Used by one thread besides that of the heartbeat; `clone` returns itself.

    Ranks share connections, because a name lookup at connect may take seconds without a name server.

    Args:
        store: the store to call; it may be shared
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._messages = self._looks = self._bytes_read = 0

    def counts(self) -> Counts:
        """The traffic so far."""
        return Counts(self._messages, self._looks, self._bytes_read)

    def clone(self) -> CountedConnection:
        """Return this connection."""
        return self

    def set(self, key: str, value: bytes) -> None:
        """See `torch.distributed.Store` for this and the following methods; counts as a message."""
        self._messages += _BEAT not in key
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Counts as a look if the amount is 0, else as a message."""
        self._messages += amount != 0
        self._looks += amount == 0
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Counts as a message."""
        self._messages += 1
        return bool(self._store.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Counts as a look."""
        self._looks += 1
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """Counts as a look."""
        return self._read([bytes(self._store.get(key))])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Counts as one look."""
        return self._read([bytes(value) for value in self._store.multi_get(list(keys))])

    def _read(self, values: list[bytes]) -> list[bytes]:
        self._looks += 1
        self._bytes_read += sum(map(len, values))
        return values
