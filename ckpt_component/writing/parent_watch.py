"""Make a child process exit when its parent has exited, for whatever reason.

PR_SET_PDEATHSIG fires when the *thread* that started the child exits, and never if that thread had exited before.
So a thread of the child watches the parent process instead.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

logger = logging.getLogger(__name__)

#: Seconds between the interrupt and the hard exit of a child whose parent has ended.
PARENT_GRACE_SECONDS = 1.0


def watch_parent(grace_seconds: float = PARENT_GRACE_SECONDS) -> None:
    """Exit when the parent process exits. Call this once, in the main thread of a `multiprocessing` child.

    When the parent exits, the main thread is interrupted as by Ctrl-C; if the process is still running after
    `grace_seconds`, it exits at once. Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(
        target=_leave_after,
        args=(parent.sentinel, parent.pid, threading.get_ident(), grace_seconds),
        name="ckpt-parent-watch",
        daemon=True,
    ).start()


def _leave_after(sentinel: int, parent_pid: int, main_thread: int, grace_seconds: float) -> None:
    pidfd = _pidfd_of(parent_pid)
    if pidfd is not None:
        # A sibling may have inherited the sentinel's pipe and hold it open; a pidfd is not affected by that.
        # No deadline: this daemon thread has nothing else to do.
        multiprocessing.connection.wait([sentinel, *([pidfd] if pidfd >= 0 else [])])
    signal.pthread_kill(main_thread, signal.SIGINT)
    time.sleep(grace_seconds)
    os._exit(1)


def _pidfd_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; None if it has exited, -1 without pidfd."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except (OSError, AttributeError) as error:
        logger.info("watching the parent process by its pipe alone, because pidfd_open failed: %s", error)
        return -1
