"""`answer_requests`: a process, or a thread of one, does what frames ask for, by a table of handlers.

    def main(outside: Outside = OUTSIDE) -> None:
        serve(_work, on_orphan="finish", outside=outside)

    def _work(job: Mapping[str, Any], parent: Channel) -> None:
        worker = Worker(job, parent.outside)
        answer_requests(parent, {"write": worker.write, "close": lambda _: END}, notes={"newest": worker.note})

A frame says by its field `kind` which handler it is for. What that returns is sent back, with `kind` `done`, and `id`
if the frame has one; what it raises, as a `failed_frame`, and the loop goes on. Notes get no answer, and what their
handlers raise ends the loop. A handler may also give several answers, and send bytes after one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from .framing import Blobs, Channel, Frame
from .remote_error import failed_frame


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
