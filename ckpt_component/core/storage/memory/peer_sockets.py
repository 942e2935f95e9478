"""Stub."""

from typing import NamedTuple


class PeerAddress(NamedTuple):
    """Where a keeper is."""

    host: str
    address: str
    port: int
    rank: int
