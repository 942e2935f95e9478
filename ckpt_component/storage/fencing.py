"""Fencing: only the run that took over a root last may commit there. A small owner file in the root names it.

A suspended run (a frozen node, SIGSTOP, a network outage) may wake up long after another one replaced it. The owner
file is read again before every commit, and a run that no longer owns the root commits nothing.
A run takes the root at its first save, not when it restores: an evaluation script must not fence off the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass

from ..errors import CheckpointFencedError
from .cleanup import leftovers, sweep
from .names import MEGATRON, OWNER, StepNames
from .storage import Storage

logger = logging.getLogger(__name__)

_MAX_BYTES = 64 << 10
#: How far the clock may have been adjusted between the start of a process and its claim.
_CLOCK_SLACK_SECONDS = 60.0


@dataclass(frozen=True)
class Owner:
    """The run that owns a root.

    Attributes:
        generation: counts the runs that have owned the root.
        token: identifies this run.
        host: host of the run's leading rank.
        pid: process ID of the leading rank.
        since: when the run took the root, seconds since 1970.
    """

    generation: int
    token: str
    host: str
    pid: int
    since: float

    @property
    def alive(self) -> bool | None:
        """Whether its leading rank is running; None if that is unknown: on another host, or in this very process."""
        if self.host != socket.gethostname():
            return None
        started = _started(self.pid)
        if started is None or started > self.since + _CLOCK_SLACK_SECONDS:
            return False  # it ended, and its process ID may have been reused
        return None if self.pid == os.getpid() else True

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {when}"


class FencingToken:
    """One run's claim to a root.

    Args:
        fs: the file system.
        root: folder of the run's checkpoints.
        steps: how steps are named there.
        token: that of the run, which another process of it has; empty: a new one.
    """

    def __init__(self, fs: Storage, root: str, steps: StepNames = MEGATRON, token: str = "") -> None:
        self._fs = fs
        self._root = root
        self._steps = steps
        self._taken = False
        #: Leftovers of earlier owners, which can no longer be committed; to be deleted.
        self._fenced: set[str] = set()
        self.token = token or os.urandom(8).hex()

    def acquire(self) -> None:
        """Take over the root at the first call; later calls check that this run still owns it. Called on rank 0 only.

        Then delete the leftovers of earlier owners on any host, except those that may be alive: none of them can be
        committed any more.

        Raises:
            CheckpointFencedError: another run took over the root concurrently.
            OSError: the owner file could not be written.
        """
        owner = read_owner(self._fs, self._root)
        if self._taken and owner is not None:
            _refuse_other(owner, self._root, self.token)
        else:
            self._take(owner)
        if self._fenced:
            self._clean_up()

    def _take(self, predecessor: Owner | None) -> None:
        if not self._taken:
            self._fenced = leftovers(self._fs, self._root, self._steps)
        generation = 1 if predecessor is None else predecessor.generation + 1
        owner = Owner(generation, self.token, socket.gethostname(), os.getpid(), time.time())
        self._fs.make_folders(self._root)
        self._fs.write_over(os.path.join(self._root, OWNER), json.dumps(asdict(owner)).encode() + b"\n")
        self._taken = True
        if predecessor is not None:
            alive = predecessor.alive
            level = logging.DEBUG if alive is False else logging.WARNING if alive else logging.INFO
            text = "took ownership of %s from %s%s, which can no longer commit there"
            logger.log(level, text, self._root, predecessor, " (still running)" if alive else "")

    def check_after(self, error: Exception) -> None:
        """After a failure, raise CheckpointFencedError if another run took over the root. Called on rank 0 only."""
        if self._taken and not isinstance(error, CheckpointFencedError):
            with contextlib.suppress(OSError):  # the original failure matters more
                owner = read_owner(self._fs, self._root)
                if owner is not None:
                    _refuse_other(owner, self._root, self.token)

    def neighbor(self) -> Owner | None:
        """The owner, if it is another process that may be alive, else None."""
        owner = read_owner(self._fs, self._root)
        if owner is None or owner.token == self.token or owner.alive is False:
            return None
        return None if (owner.host, owner.pid) == (socket.gethostname(), os.getpid()) else owner

    def _clean_up(self) -> None:
        try:
            for name in sweep(self._fs, self._root, self._steps, self._fenced):
                logger.info("deleted %s, which an earlier run left", os.path.join(self._root, name))
            self._fenced &= leftovers(self._fs, self._root, self._steps)
        except OSError as error:
            logger.warning("could not search %s for what earlier runs left: %s", self._root, error)


def check_owner(fs: Storage, root: str, token: str) -> None:
    """Raise CheckpointFencedError unless the run with this token owns the root."""
    owner = read_owner(fs, root)
    if owner is None:
        # It was deleted: a run that took over would have replaced it.
        logger.warning("%s is missing; committing without it", os.path.join(root, OWNER))
        return
    _refuse_other(owner, root, token)


def read_owner(fs: Storage, root: str) -> Owner | None:
    """The owner of a root, or None if there is no owner file or it is damaged."""
    path = os.path.join(root, OWNER)
    try:
        owner = Owner(**json.loads(fs.read(path, _MAX_BYTES)))
        numbers = (owner.generation, owner.pid, owner.since)
        if not all(isinstance(each, (int, float)) for each in numbers) or not isinstance(owner.host, str):
            raise ValueError("a value of another type")
        return owner
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("%s is damaged (%s)", path, error)
        return None


def _refuse_other(owner: Owner, root: str, token: str) -> None:
    if owner.token != token:
        raise CheckpointFencedError(
            f"Another run took over {root} ({owner}), so this one can no longer commit there; end one of the two, "
            "or give each a checkpoint.dir of its own."
        )


def _started(pid: int) -> float | None:
    """The start time of a process of this host, seconds since 1970; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            values = stream.read().rpartition(")")[2].split()
        with open("/proc/uptime") as stream:
            uptime = float(stream.read().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return None
    if values[0] in "ZX":
        return None
    return time.time() - uptime + int(values[19]) / os.sysconf("SC_CLK_TCK")
