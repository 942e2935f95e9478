"""The loop of a process that answers requests, and obeys its parent alone.

The loop handles one request at a time, until the parent closes the connection or dies. A failed request is answered
with its traceback as text, and the loop continues. The handler interprets the requests. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from ..core.outside import Socket
from ..core.processes.framing import Channel
from ..core.processes.serve import SIGNALS_OF_THE_TRAINER, FrameRequest, Reply, answer_requests, failed_frame

#: A function, its positional arguments, and its keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: A loop and its arguments after the socket, pickled unless they are inherited.
Work = bytes | tuple[Callable[..., None], tuple[Any, ...]]

#: These end the process. Any other error is an answer, including torch's CheckpointException, which is a
#: BaseException.
_LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)


def serve(sock: Socket, make_handler: Callable[[], Callable[[Any], Any]]) -> None:
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
            parent.send(failed_frame(error))
            return
        parent.send({"kind": "ready"})
        answer = partial(_answer, handler)
        answer_requests(parent, {"call": answer}, answer)


def _answer(handler: Callable[[Any], Any], request: FrameRequest) -> Iterator[Reply]:
    asked = None
    try:
        asked = pickle.loads(request.blob)
        request.blob.release()  # otherwise the state would be in memory twice during the request
        yield Reply(blobs=[pickle.dumps(handler(asked), protocol=pickle.HIGHEST_PROTOCOL)])
    except _LEAVING:
        raise
    except BaseException as error:
        yield Reply(failed_frame(error))
    del asked
    gc.collect()  # free a state dict in a reference cycle before the next request


def serve_calls(sock: Socket, log_level: int) -> None:
    """A loop whose requests are calls."""
    logging.getLogger("ckpt_component").setLevel(log_level)
    serve(sock, lambda: run_call)


def run_call(call: Call) -> None:
    """Make a call; its result stays in the process."""
    function, args, kwargs = call
    function(*args, **kwargs)


def enter(index: int, sock: Socket, parents_end: Socket | None, work: Work) -> None:
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
        _channel_to_parent(sock).send(failed_frame(error))
        return
    loop(sock, *args)


def _channel_to_parent(sock: Socket) -> Channel:
    return Channel(sock, lambda: True, patience=math.inf)  # `start_processes` lets this process notice its death


def _obey_the_parent_alone(sock: Socket) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach a whole process group, unless the parent has closed the connection."""
    parent = _channel_to_parent(sock)

    def leave_if_the_parent_left(number: int, _frame: FrameType | None) -> None:
        if parent.hung_up:
            raise SystemExit(128 + number)

    for number in SIGNALS_OF_THE_TRAINER:
        signal.signal(number, leave_if_the_parent_left)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_THE_TRAINER)
