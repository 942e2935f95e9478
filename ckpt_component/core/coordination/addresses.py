"""Where other hosts of a job reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

from .connection import innermost_store
from .coordinator import distributed

#: Nothing is sent to it.
_ANY_PORT = 9


def own_address() -> str:
    """The address of the interface from which this host reaches the store of the job.

    Raises:
        OSError: as `address_towards`
    """
    host = None
    if distributed() is not None:
        store = innermost_store(sys.modules["torch.distributed"].distributed_c10d._get_default_store())
        host = getattr(store, "host", None)
    return address_towards(host or os.environ.get("MASTER_ADDR") or socket.gethostname())


def address_towards(host: str) -> str:
    """The address of the interface from which this host would reach another one, which is asked nothing.

    Args:
        host: name or address of the other host

    Raises:
        OSError: the name has no address, or there is no way to it
    """
    (family, _, _, _, place), *_ = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        return str(sock.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
