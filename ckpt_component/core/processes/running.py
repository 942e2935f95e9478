"""Which process wrote a file, and whether it is still running.

A process ID alone says little: other hosts and other containers have the same numbers, and a number is used again. So a
process is named by its host, the space in which its ID counts, its ID, and when it started.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..outside import OUTSIDE, Outside

_KEY = re.compile(r"([0-9a-f]*)-(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ProcessName:
    """One process, as a file names it.

    Attributes:
        host: name of its host
        pid: its process ID
        space: identifies the processes that it sees: of one boot of one host, in one container; empty: unknown
        started: when it started, in clock ticks since that boot; 0: unknown
        outside: of the process that asks whether it is running
    """

    host: str
    pid: int
    space: str = ""
    started: int = 0
    outside: Outside = field(default=OUTSIDE, compare=False, repr=False)

    @classmethod
    def current(cls, outside: Outside = OUTSIDE) -> ProcessName:
        """This process."""
        pid = outside.pid()
        return cls(outside.host_name(), pid, outside.space(), outside.started(pid) or 0, outside)

    @classmethod
    def of_key(cls, key: str, outside: Outside = OUTSIDE) -> ProcessName | None:
        """The process of this host whose `key` this is; None: it is no key. An early key has no start time."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        return cls(outside.host_name(), int(match[2]), match[1], int(match[3] or 0), outside)

    @property
    def key(self) -> str:
        """Names the process within its host, as part of a file's name."""
        return f"{self.space}-{self.pid}-{self.started}"

    @property
    def running(self) -> bool | None:
        """Whether it is running; None: unknown, because it is not seen from here, or not fully named."""
        outside = self.outside
        if not self.space or self.pid < 1 or self.host != outside.host_name() or self.space != outside.space():
            return None
        if not outside.is_running(self.pid):
            return False
        try:
            started = outside.started(self.pid)
        except OSError:
            return None  # /proc hides the processes of other users
        if started is None or (self.started and started != self.started):
            return False
        return True if self.started else None
