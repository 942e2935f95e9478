"""What a supervised process does: it ends with its parent, reports its error, and may answer requests in a loop.

The loop handles one request at a time, until the parent closes the connection or dies. A failed request is answered
with its traceback as text, and the loop continues. The handler interprets the requests. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ..core.processes.framing import Channel
from ..core.processes.remote_error import describe_failure
from ..core.processes.serve import SIGNALS_OF_THE_TRAINER

logger = logging.getLogger(__name__)

#: A function, its positional arguments, and its keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: A loop and its arguments after the socket, pickled unless they are inherited.
Work = bytes | tuple[Callable[..., None], tuple[Any, ...]]

#: These end the process. Any other error is an answer, including torch's CheckpointException, which is a
#: BaseException.
_LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
#: Between the interrupt and the hard exit of a process whose parent has ended.
_PARENT_GRACE_SECONDS = 1.0


def run_supervised(fn: Callable[..., Any], index: int, args: tuple[Any, ...], error_file: str) -> None:
    """Call `fn(index, *args)`, for `start_processes`, and exit with 1 if it raises.

    When the parent process ends, the main thread is interrupted as by Ctrl-C; if the process still runs a second later,
    it exits at once.

    Args:
        fn: the function
        index: number of the process
        args: further arguments
        error_file: where the traceback goes; its private folder is created for it
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # as `multiprocessing` has started this process
    watch = (parent.sentinel, parent.pid, threading.get_ident())
    threading.Thread(target=_leave_with, args=watch, name="ckpt-parent-watch", daemon=True).start()
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        pass  # the parent has died, or the user pressed Ctrl-C, which the parent reports
    except Exception:
        text = traceback.format_exc()
        try:
            os.makedirs(os.path.dirname(error_file), mode=0o700, exist_ok=True)
            Path(error_file).write_text(text)
        except OSError as error:
            print(f"{text}\n(could not leave this for the parent process: {error})", file=sys.stderr)
        sys.exit(1)


def serve(sock: socket.socket, make_handler: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer requests until the parent closes the connection.

    Args:
        sock: connection to the parent
        make_handler: called once, before the process reports that it is ready. It returns the handler, which is
            called with each unpickled request and whose result is pickled as the answer.
    """
    parent = _channel_to_parent(sock)
    with contextlib.suppress(ConnectionError):  # the parent has died
        try:
            handler = make_handler()
        except _LEAVING:
            raise
        except BaseException as error:
            parent.send(describe_failure(error))
            return
        parent.send({})
        while (frame := parent.receive()) is not None:
            request = None
            try:
                request = pickle.loads(frame[1])
                del frame  # otherwise the state would be in memory twice during the request
                answer = pickle.dumps(handler(request), protocol=pickle.HIGHEST_PROTOCOL)
            except _LEAVING:
                raise
            except BaseException as error:
                parent.send(describe_failure(error))
            else:
                parent.send({}, blobs=[answer])
            del request
            gc.collect()  # free a state dict in a reference cycle before the next request


def serve_calls(sock: socket.socket, log_level: int) -> None:
    """A loop whose requests are calls."""
    logging.getLogger("ckpt_component").setLevel(log_level)
    serve(sock, lambda: run_call)


def run_call(call: Call) -> None:
    """Make a call; its result stays in the process."""
    function, args, kwargs = call
    function(*args, **kwargs)


def enter(index: int, sock: socket.socket, parents_end: socket.socket | None, work: Work) -> None:
    """First function of the process, for `start_processes`.

    Args:
        index: 0
        sock: this process's end of the connection
        parents_end: in a forked process, the inherited copy of the parent's end, which would hide the parent's death
        work: what it runs
    """
    if parents_end is not None:
        parents_end.close()
        gc.freeze()  # objects inherited by the fork must not be collected here
    _obey_the_parent_alone(sock)
    try:
        loop, args = pickle.loads(work) if isinstance(work, bytes) else work
    except Exception as error:
        _channel_to_parent(sock).send(describe_failure(error))
        return
    loop(sock, *args)


def _channel_to_parent(sock: socket.socket) -> Channel:
    return Channel(sock, lambda: True, patience=math.inf)  # `start_processes` lets this process notice its death


def _obey_the_parent_alone(sock: socket.socket) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach a whole process group, unless the parent has closed the connection."""

    def leave_if_the_parent_left(number: int, _frame: FrameType | None) -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # a hang-up is always reported
        if poll.poll(0):
            raise SystemExit(128 + number)

    for number in SIGNALS_OF_THE_TRAINER:
        signal.signal(number, leave_if_the_parent_left)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_THE_TRAINER)


def _leave_with(sentinel: int, parent_pid: int, main_thread: int) -> None:
    watched = [sentinel]
    try:
        # A sibling may have inherited the sentinel's pipe and hold it open; a pidfd is not affected by that.
        watched.append(os.pidfd_open(parent_pid))
    except ProcessLookupError:
        watched = []  # it has exited
    except (OSError, AttributeError) as error:
        logger.info("watching the parent process by its pipe alone, because pidfd_open failed: %s", error)
    if watched:
        multiprocessing.connection.wait(watched)  # no deadline: this daemon thread has nothing else to do
    signal.pthread_kill(main_thread, signal.SIGINT)
    time.sleep(_PARENT_GRACE_SECONDS)
    os._exit(1)
