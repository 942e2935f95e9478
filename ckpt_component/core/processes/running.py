"""Which process wrote a file, and whether it is still running.

A process ID alone says little: other hosts and other containers have the same numbers, and a number is used again. So a
process is named by its host, the space in which its ID counts, its ID, and when it started.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass

HOST_VARIABLE = "CKPT_HOST"
_KEY = re.compile(r"([0-9a-f]*)-(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ProcessName:
    """One process, as a file names it.

    Attributes:
        host: name of its host
        pid: its process ID
        space: identifies the processes that it sees: of one boot of one host, in one container; empty: unknown
        started: when it started, in clock ticks since that boot; 0: unknown
    """

    host: str
    pid: int
    space: str = ""
    started: int = 0

    @classmethod
    def current(cls) -> ProcessName:
        """This process."""
        return cls(host_name(), os.getpid(), _space(), _started("self") or 0)

    @classmethod
    def of_key(cls, key: str) -> ProcessName | None:
        """The process of this host whose `key` this is; None: it is no key. An early key has no start time."""
        match = _KEY.fullmatch(key)
        return None if match is None else cls(host_name(), int(match[2]), match[1], int(match[3] or 0))

    @property
    def key(self) -> str:
        """Names the process within its host, as part of a file's name."""
        return f"{self.space}-{self.pid}-{self.started}"

    @property
    def running(self) -> bool | None:
        """Whether it is running; None: unknown, because it is not seen from here, or not fully named."""
        if not self.space or self.pid < 1 or self.host != host_name() or self.space != _space():
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            pass  # it is another user's
        try:
            started = _started(str(self.pid))
        except OSError:
            return None  # /proc hides the processes of other users
        if started is None or (self.started and started != self.started):
            return False
        return True if self.started else None


def host_name() -> str:
    """The name of this host; the environment variable CKPT_HOST overrides it, so that one machine can be several."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def _space() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # /proc shows the processes of another container
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return hashlib.sha256(f"{stream.read()}{os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:8]
    except OSError:
        return ""


def _started(process: str) -> int | None:
    """When a process started, in clock ticks since the boot; None: it is a zombie. Raises OSError: unknown."""
    with open(f"/proc/{process}/stat", "rb") as stream:
        values = stream.read().rpartition(b")")[2].split()
    return None if values[0] in (b"Z", b"X") else int(values[19])
