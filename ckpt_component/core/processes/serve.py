"""The side of a child process: connect, answer requests by a table of handlers, and send errors as text."""

from __future__ import annotations

import contextlib
import errno
import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from ...errors import CheckpointSaveError, RemoteTraceback, error_as_plain
from ..outside import OUTSIDE, Outside
from .framing import Blobs, Channel, Frame


def failed_frame(error: BaseException, *, traced: bool = True, **answered: Any) -> dict[str, Any]:
    """The frame that tells another process of an exception.

    Args:
        error: the exception
        traced: with its traceback, which takes a while; only then `as_local_error` is its inverse
        **answered: further fields, which say what has failed
    """
    frame = {"kind": "failed", **answered, **error_as_plain(error)}
    frame.update(reason=getattr(error, "strerror", None), path=getattr(error, "filename", None))
    if traced:
        frame["traceback"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return frame


def as_local_error(plain: Mapping[str, Any], what: str) -> CheckpointSaveError:
    """Return the error to raise here for a failure in another process; `what` is the first half of its text."""
    error = CheckpointSaveError(f"{what}: {plain['error']}", plain["errno"])
    error.__cause__ = RemoteTraceback(plain["traceback"])
    return error


def as_os_error(plain: Mapping[str, Any]) -> OSError:
    """Return the OSError that another process had, or one of EIO for what was none."""
    # Another release may not tell the reason apart.
    code, text = plain["errno"], plain.get("reason") or plain["error"]
    return OSError(code, text, plain["path"]) if code else OSError(errno.EIO, text)


class FrameRequest(NamedTuple):
    """A frame that asks for something.

    Attributes:
        channel: on which it came
        number: counts the frames of the channel, from 1 on
        header, blob, fds: what came; the descriptors belong to the handler
    """

    channel: Channel
    number: int
    header: dict[str, Any]
    blob: memoryview
    fds: list[int]


class Reply(NamedTuple):
    """A frame that answers one: values, and bytes and descriptors, of which copies are sent."""

    values: Mapping[str, Any] = MappingProxyType({})
    blobs: Blobs = ()
    fds: Sequence[int] = ()


class _LoopEnd:
    pass


#: What a handler returns to end the loop without an answer.
END: Final = _LoopEnd()

#: Returns the answer, or its values, if there are any; or gives one after the other, which are sent as they come.
Handler = Callable[[FrameRequest], Mapping[str, Any] | Reply | Iterator[Reply] | _LoopEnd | None]


def answer_requests(
    channel: Channel,
    handlers: Mapping[str, Handler],
    unknown: Handler,
    *,
    notes: Mapping[str, Callable[[FrameRequest], object]] = MappingProxyType({}),
    field: str = "kind",
    receive: Callable[[], Frame | None] | None = None,
    seconds: float | None = None,
    traced: bool = True,
) -> bool:
    """Do what comes on a channel, until a handler ends it, or the other side hangs up or dies.

    Args:
        channel: the connection
        handlers: of the requests, by what `field` says
        unknown: of all other frames
        notes: of frames that get no answer
        field: says what a frame is for
        receive: returns the next frame; None: that of the channel does
        seconds: how long the other side may take to take an answer; None: any time
        traced: tell tracebacks, too

    Returns:
        Whether a handler has ended it.

    Raises:
        ConnectionAbortedError: a frame was damaged, as the other side was told
        OSError: an answer could not be sent, or a note failed
    """
    number = 0
    while True:
        number += 1
        try:
            frame = channel.receive() if receive is None else receive()
        except ConnectionAbortedError as error:
            channel.send(failed_frame(error, traced=traced), _deadline(channel, seconds))
            raise
        if frame is None:
            return False
        header, request = frame[0], FrameRequest(channel, number, *frame)
        kind = header.get(field)
        if isinstance(kind, str) and kind in notes:
            notes[kind](request)
            continue
        answered = {"id": header["id"]} if "id" in header else {}
        try:
            result = handlers.get(header[field], unknown)(request)
            if isinstance(result, _LoopEnd):
                return True
            if isinstance(result, Reply):
                result = iter([result])
            for answer in [Reply(result or {})] if result is None or isinstance(result, Mapping) else result:
                header = {"kind": "done", **answered, **answer.values}
                channel.send(header, _deadline(channel, seconds), answer.blobs, answer.fds)
        except Exception as error:
            # If the other side does not take the answer in time, this raises, and the connection ends.
            channel.send(failed_frame(error, traced=traced, **answered), _deadline(channel, seconds))


def _deadline(channel: Channel, seconds: float | None) -> float:
    return float("inf") if seconds is None else channel.outside.now() + seconds


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
