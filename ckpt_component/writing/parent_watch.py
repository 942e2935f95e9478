"""A child process that ends when its parent has ended, in whatever way.

The kernel's own means (PR_SET_PDEATHSIG) fires when the *thread* that started the child ends, and not at all
when that thread had ended already. So a thread of the child watches the parent process instead.
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
    """Call this in the main thread of a child of `multiprocessing`, once.

    When the parent ends, the main thread is interrupted as by Ctrl-C; when it has not left within `grace_seconds`,
    the process exits at once. Does nothing in a process that `multiprocessing` did not start.
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
        # The sentinel is a pipe that a sibling may have inherited and hold open; the pidfd cannot be fooled so.
        # No deadline: this is what the thread is for, and it is a daemon.
        multiprocessing.connection.wait([sentinel, *([pidfd] if pidfd >= 0 else [])])
    signal.pthread_kill(main_thread, signal.SIGINT)
    time.sleep(grace_seconds)
    os._exit(1)


def _pidfd_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None when it has ended, -1 without pidfd support."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except (OSError, AttributeError) as error:
        logger.info("watching the parent process by its pipe alone, because pidfd_open failed: %s", error)
        return -1
