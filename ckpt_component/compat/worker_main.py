"""What runs in a supervised process: it answers numbered requests until its parent ends the conversation or dies.

One request at a time, each answered under its number. A request that fails is answered with its traceback as text,
and the loop goes on. The handler decides what a request means. Standard library alone.
"""

from __future__ import annotations

import gc
import logging
import pickle
import select
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from ..writing.remote_error import describe_failure
from .messages import END, READY, TAKEN, receive_message, send_message

#: Held back in a process that starts, until its handlers for them are in place.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: These end the process, wherever they are raised. All else is an answer, torch's CheckpointException too, which is a
#: BaseException.
_LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)


def serve(connection: Connection, make_handler: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer requests until the parent ends the conversation.

    Args:
        connection: the process's end of a duplex pipe.
        make_handler: called once, before the process reports that it is ready. It returns what is called with each
            unpickled request; what that returns is pickled as the answer.
    """
    try:
        handler = make_handler()
    except _LEAVING:
        raise
    except BaseException as error:
        _send(connection, READY, False, describe_failure(error))
        return
    if not _send(connection, READY, True, None):
        return
    while True:
        try:
            number, body = receive_message(connection)
        except (EOFError, ConnectionResetError):
            return  # the parent has died
        if number == END and not body:
            return
        if not _send(connection, TAKEN, True, None) or not _answer(connection, number, body, handler):
            return
        if number == END:
            return
        del body
        gc.collect()  # a state dict in a reference cycle would stay until the next request


def serve_calls(connection: Connection, log_level: int) -> None:
    """A loop whose requests are calls: (function, positional arguments, keyword arguments)."""
    logging.getLogger("ckpt_component").setLevel(log_level)
    serve(connection, lambda: run_call)


def serve_inherited_call(
    connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A loop with one call that a forked process has inherited, so that nothing of it was pickled."""
    serve(connection, lambda: lambda _request: run_call((function, args, kwargs)))


def run_call(request: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
    """Make one call for its effect; what it returns stays in the process."""
    function, args, kwargs = request
    function(*args, **kwargs)


def enter(
    index: int,
    connection: Connection,
    inherited: Connection | None,
    work: bytes | tuple[Callable[..., None], tuple[Any, ...]],
) -> None:
    """First function of the process, for `start_processes`.

    Args:
        index: 0.
        connection: this process's end of the pipe.
        inherited: in a forked process a copy of the parent's end, which would hide the parent's death.
        work: a loop and its arguments after the connection, pickled unless they are inherited.
    """
    if inherited is not None:
        inherited.close()
        gc.freeze()  # what was inherited is the parent's to collect
    _obey_the_parent_alone(connection)
    try:
        loop, args = pickle.loads(work) if isinstance(work, bytes) else work
    except Exception as error:
        _send(connection, READY, False, describe_failure(error))
        return
    loop(connection, *args)


def _answer(connection: Connection, number: int, body: bytearray, handler: Callable[[Any], Any]) -> bool:
    """Handle one request; False when the parent has died."""
    try:
        request = pickle.loads(body)
        body.clear()  # the state is there twice otherwise, for as long as the request runs
        answer = pickle.dumps(handler(request), protocol=pickle.HIGHEST_PROTOCOL)
    except _LEAVING:
        raise
    except BaseException as error:
        return _send(connection, number, False, describe_failure(error))
    return _send(connection, number, True, answer)


def _send(connection: Connection, number: int, good: bool, content: Any) -> bool:
    try:
        send_message(connection, number, pickle.dumps((good, content), protocol=pickle.HIGHEST_PROTOCOL))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _obey_the_parent_alone(connection: Connection) -> None:
    """Ignore Ctrl-C and SIGTERM, which a whole process group gets, unless the parent has left the pipe."""

    def leave_if_the_parent_left(number: int, _frame: FrameType | None) -> None:
        if _other_side_left(connection):
            raise SystemExit(128 + number)

    for number in GROUP_SIGNALS:
        signal.signal(number, leave_if_the_parent_left)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _other_side_left(connection: Connection) -> bool:
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # hang-up is reported without being asked for
    return bool(poll.poll(0))
