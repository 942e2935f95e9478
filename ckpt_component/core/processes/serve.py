"""What a process that `Child` has started does with signals, and when its parent has gone.

Standard library only, because the byte writer uses it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ..outside import OUTSIDE, Outside
from .framing import Blobs, Channel

#: They reach a whole process group, or all processes of a Slurm step, and are meant for the trainer.
SIGNALS_OF_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ParentChannel(Channel):
    """The connection to the parent, which may die at any time: what is then sent is dropped, and `receive` ends."""

    def send(
        self, header: Mapping[str, Any], deadline: float = math.inf, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame, as `Channel.send`; nothing if the parent has closed the connection."""
        with contextlib.suppress(ConnectionError):
            super().send(header, deadline, blobs, fds)


def serve(
    work: Callable[[dict[str, Any], Channel], dict[str, Any] | None],
    *,
    on_orphan: Literal["exit", "finish"],
    outside: Outside = OUTSIDE,
) -> None:
    """Do the work of this process, which obeys its parent, and no signal that is meant for the trainer.

    Args:
        work: called with the job and the connection to the parent, which ends when the parent hangs up or dies, even
            if a process that it forked lives on. It takes its outside from the connection. What it returns is sent as
            the answer when all that it held is let go, as the parent then hangs up.
        on_orphan: what happens then. `exit`: SystemExit is raised in `work`, which does not receive. `finish`: `work`
            continues, and learns of it when it receives. In both cases what it sends is dropped.
        outside: of this process
    """
    for number in SIGNALS_OF_THE_TRAINER:
        outside.on_signal(number, None)
    pid = outside.parent()
    parent = ParentChannel(outside.inherited(), lambda: outside.parent() == pid, patience=math.inf, outside=outside)
    first = parent.receive()
    if first is None:
        sys.exit(1)
    if on_orphan == "exit":
        with outside.interruptible() as interrupt:
            outside.start("ckpt-parent-watch", _leave_with, parent, interrupt)
            answer = work(first[0], parent)
    else:
        answer = work(first[0], parent)
    if answer is not None:
        parent.send(answer)


def _leave_with(parent: Channel, interrupt: Callable[[], None]) -> None:
    parent.receive()
    interrupt()
