"""`address_towards`: where other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket

#: Nothing is sent to it.
_ANY_PORT = 9


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
