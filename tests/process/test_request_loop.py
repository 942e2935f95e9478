"""`answer_requests`: one loop over a table of handlers, with real and simulated connections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulated.hosts import SimulatedHosts

from ckpt_component.core.outside import OUTSIDE, Outside
from ckpt_component.core.processes.framing import Channel, FrameSignatures
from ckpt_component.core.processes.serve import (
    END,
    FrameRequest,
    Reply,
    answer_requests,
    as_local_error,
    as_os_error,
    failed_frame,
)
from ckpt_component.errors import CheckpointExistsError, CheckpointSaveError, error_as_plain, error_from_plain

Script = Callable[[Outside], None]


def in_a_simulation(script: Script) -> None:
    simulation = SimulatedHosts(seed=2)
    process = simulation.process("one")
    process.start(script, process.outside)
    assert simulation.run(600.0), "it hangs"


@pytest.fixture(params=[lambda script: script(OUTSIDE), in_a_simulation], ids=["real", "simulated"])
def run(request: pytest.FixtureRequest) -> Callable[[Script], None]:
    chosen: Callable[[Script], None] = request.param
    return chosen


def several(request: FrameRequest) -> Iterator[Reply]:
    yield Reply({"number": request.number}, [bytes(request.blob)], request.fds)
    for fd in request.fds:
        os.close(fd)
    yield Reply({"more": True})
    request.channel.outside.sleep(0)


def fail(request: FrameRequest) -> dict[str, Any]:
    os.stat(request.header["path"])
    return {}


def refuse(request: FrameRequest) -> dict[str, Any]:
    raise ValueError(f"not {request.header['kind']}")


def served(outside: Outside, noted: list[Any], ended: list[bool]) -> Channel:
    ours, theirs = (Channel(sock, lambda: True, outside=outside) for sock in outside.pair())

    def serve() -> None:
        handlers = {"several": several, "fail": fail, "close": lambda _: END, "echo": lambda each: each.header["what"]}
        notes = {"note": lambda each: noted.append(each.header["what"])}
        ended.append(answer_requests(theirs, handlers, refuse, notes=notes))
        theirs.close()

    outside.start("serves", serve)
    return ours


def asked(channel: Channel, deadline: float, **header: Any) -> dict[str, Any]:
    channel.send(header, deadline)
    frame = channel.receive(deadline)
    assert frame is not None
    return frame[0]


def test_requests_are_answered_and_notes_are_not(run: Callable[[Script], None]) -> None:
    def script(outside: Outside) -> None:
        noted, ended, soon = list[Any](), list[bool](), outside.now() + 60
        channel = served(outside, noted, ended)
        channel.send({"kind": "note", "what": 3, "id": 1}, soon)
        assert asked(channel, soon, kind="echo", what={"a": 1}, id=7) == {"kind": "done", "id": 7, "a": 1}
        assert noted == [3]
        with open(__file__, "rb") as stream:
            channel.send({"kind": "several"}, soon, [b"some", b"thing"], [stream.fileno()])
        first, second = channel.receive(soon), channel.receive(soon)
        assert first is not None and second is not None
        assert first[0] == {"kind": "done", "number": 3} and bytes(first[1]) == b"something"
        assert os.pread(first[2][0], 4, 0) == b'"""`' and second[0] == {"kind": "done", "more": True}
        os.close(first[2][0])
        channel.send({"kind": "close"}, soon)
        assert channel.receive(soon) is None and ended == [True]
        channel.close()

    run(script)


def test_what_fails_is_told_and_the_next_request_is_answered(run: Callable[[Script], None]) -> None:
    def script(outside: Outside) -> None:
        soon, ended = outside.now() + 60, list[bool]()
        channel = served(outside, [], ended)
        failed = asked(channel, soon, kind="fail", path="/none", id=2)
        error = as_os_error(failed)
        assert isinstance(error, FileNotFoundError) and error.filename == "/none" and failed["id"] == 2
        local = as_local_error(failed, "It could not")
        assert str(local).startswith("It could not: FileNotFoundError: ") and "in fail" in str(local.__cause__)
        assert str(as_os_error(asked(channel, soon, kind="other"))) == "[Errno 5] ValueError: not other"
        assert "KeyError" in asked(channel, soon, what=1)["error"]
        assert asked(channel, soon, kind="echo", what={})["kind"] == "done"
        channel.close()
        while not ended:
            outside.sleep(0.01)
        assert ended == [False]

    run(script)


def test_a_frame_that_was_damaged_is_refused_in_words(run: Callable[[Script], None]) -> None:
    def script(outside: Outside) -> None:
        pairs = list[Channel]()
        for sock, keys in zip(outside.pair(), ((b"a", b"b"), (b"x", b"a")), strict=True):
            outside_keys = FrameSignatures(keys, "the other one")
            pairs.append(Channel(sock, lambda: True, 10.0, outside=outside, signatures=outside_keys))
        ours, theirs = pairs
        ours.send({"kind": "echo"}, blobs=[b"x"])
        frame = theirs.receive()
        assert frame is not None and bytes(frame[1]) == b"x"
        with pytest.raises(ValueError, match="another host"):
            ours.send({}, fds=[0])
        theirs.send({"kind": "echo"})
        with pytest.raises(ConnectionAbortedError, match="what the other one sent was damaged"):
            ours.receive()
        for channel in pairs:
            channel.close()

    run(script)


def test_an_error_is_told_in_one_way_and_comes_back_with_its_type_or_as_a_text() -> None:
    for error in (CheckpointExistsError("it: is there"), CheckpointSaveError("", 28)):
        frame = failed_frame(error, id=3)
        back = error_from_plain(frame)
        assert (type(back), str(back), getattr(back, "errno", None)) == (type(error), str(error), error.errno)
        assert {"kind": "failed", "id": 3, **error_as_plain(error)}.items() <= frame.items()
    assert str(error_from_plain(error_as_plain(KeyError("x")))) == "On the leading rank: KeyError: 'x'"
    # Of another release, which tells less.
    assert str(as_os_error({"kind": "failed", "errno": 13, "error": "no", "path": None})) == "[Errno 13] no"
