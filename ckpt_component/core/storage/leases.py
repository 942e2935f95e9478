"""Whether a file is open anywhere else on this host, which the kernel says by granting a lease on it, or not."""

from __future__ import annotations

import fcntl
import logging
import os
import signal

from .safe_open import open_regular

logger = logging.getLogger("ckpt_component.storage")


def is_open_elsewhere(path: str) -> bool:
    """Whether another descriptor or mapping of a file exists on this host; True where that cannot be found out.

    Raises:
        OSError: the file cannot be opened
    """
    fd = open_regular(path)
    try:
        # Who opens the file before the lease is given back waits for that, and this process gets a signal: by default
        # SIGIO, which would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError as error:  # another user's file, or a file system without leases, such as NFS
        logger.info("it is unknown whether %s is open elsewhere (%s)", path, error)
        return True
    finally:
        os.close(fd)
    return False
