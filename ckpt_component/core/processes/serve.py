"""What a process that `Child` has started does with signals, and when its parent has gone.

Standard library only, because the byte writer uses it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
    work: Callable[[dict[str, Any], Channel], dict[str, Any] | None], *, on_orphan: Literal["exit", "finish"]
) -> None:
    """Do the work of this process, which obeys its parent, and no signal that is meant for the trainer.

    Args:
        work: called with the job and the connection to the parent, which ends when the parent hangs up or dies, even
            if a process that it forked lives on. What it returns is sent as the answer when all that it held is let go,
            as the parent then hangs up.
        on_orphan: what happens then. `exit`: SystemExit is raised in `work`, which does not receive. `finish`: `work`
            continues, and learns of it when it receives. In both cases what it sends is dropped.
    """
    for number in SIGNALS_OF_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    pid = os.getppid()
    parent = ParentChannel(socket.socket(fileno=int(sys.argv[2])), lambda: os.getppid() == pid, patience=math.inf)
    first = parent.receive()
    if first is None:
        sys.exit(1)
    if on_orphan == "exit":
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
        threading.Thread(target=_leave_with, args=(parent,), name="ckpt-parent-watch", daemon=True).start()
    try:
        answer = work(first[0], parent)
    finally:
        signal.signal(signal.SIGALRM, lambda *_: None)
    if answer is not None:
        parent.send(answer)


def _leave_with(parent: Channel) -> None:
    parent.receive()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
