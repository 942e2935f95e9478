"""Where other hosts of a job reach this one."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Sequence

from ..outside import Outside
from .connection import innermost_store
from .coordinator import distributed

logger = logging.getLogger(__name__)


def offered_address(outside: Outside) -> str:
    """Where other hosts reach this one; empty, with a warning: nowhere."""
    try:
        return own_address(outside)
    except OSError as error:
        logger.warning("the address by which other hosts reach this one cannot be found: %s", error)
        return ""


def reachable(addresses: Sequence[str], outside: Outside) -> list[str]:
    """On the leading rank: what ranks have offered, as other hosts reach it.

    Who reaches the job's store by the loopback is on this host, and others need another address of it.

    Raises:
        OSError: as `Outside.address_towards`
    """
    far = next((address for address in addresses if not is_loopback(address)), None)
    if far is None:
        return [*addresses]
    own = outside.address_towards(far)
    return [own if is_loopback(address) else address for address in addresses]


def own_address(outside: Outside) -> str:
    """The address of the interface from which this host reaches the store of the job.

    Raises:
        OSError: as `Outside.address_towards`
    """
    host = None
    if distributed() is not None:
        store = innermost_store(sys.modules["torch.distributed"].distributed_c10d._get_default_store())
        host = getattr(store, "host", None)
    return outside.address_towards(host or outside.environment.get("MASTER_ADDR") or os.uname().nodename)


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
