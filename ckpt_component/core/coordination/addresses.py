"""Where other hosts of a job reach this one."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence

from .connection import innermost_store
from .coordinator import distributed

logger = logging.getLogger(__name__)

#: Nothing is sent to it.
_ANY_PORT = 9


def offered_address() -> str:
    """Where other hosts reach this one; empty, with a warning: nowhere."""
    try:
        return own_address()
    except OSError as error:
        logger.warning("the address by which other hosts reach this one cannot be found: %s", error)
        return ""


def reachable(addresses: Sequence[str]) -> list[str]:
    """On the leading rank: what ranks have offered, as other hosts reach it.

    Who reaches the job's store by the loopback is on this host, and others need another address of it.

    Raises:
        OSError: as `address_towards`
    """
    far = next((address for address in addresses if not is_loopback(address)), None)
    if far is None:
        return [*addresses]
    own = address_towards(far)
    return [own if is_loopback(address) else address for address in addresses]


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
