"""What is announced to the disk: all that is not in memory, a bounded way ahead, and nothing once nobody reads."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_checkpointer
from ckpt_component.readers import readahead
from ckpt_component.readers.readahead import ReadAhead

STEP, LEAD = readahead._STEP_BYTES, readahead._LEAD_BYTES


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What is announced, of files of which nothing is in memory."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(readahead, "_is_cached", lambda descriptor, position: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: told.append((fd, offset, length)))
    return told


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-read-ahead"]


def test_a_bounded_way_ahead_and_then_all(announced: list[tuple[int, int, int]]) -> None:
    sizes = [LEAD, 3 * STEP + 5, LEAD // 2]
    with ReadAhead([(number, 100, size) for number, size in enumerate(sizes)]) as reading:
        until(lambda: reading._resting)
        assert sum(length for *_, length in announced) == LEAD
        read = 0
        while read < sum(sizes):
            step = min(STEP // 2, sum(sizes) - read)
            reading.advance(step)
            read += step
            assert sum(length for *_, length in announced) <= read + LEAD + STEP
        until(lambda: not reading._thread.is_alive())
    for number, size in enumerate(sizes):
        mine = [(offset, length) for fd, offset, length in announced if fd == number]
        assert mine[0][0] == 100 and sum(length for _, length in mine) == size
        assert all(before[0] + before[1] == after[0] for before, after in itertools.pairwise(mine))


def test_neighbours_are_announced_as_one(announced: list[tuple[int, int, int]]) -> None:
    half = STEP // 2
    ranges = [(0, 10, half), (0, 10 + half + 60, half - 60), (0, 3 * STEP, 5), (1, 3 * STEP + 5, 7)]
    with ReadAhead(ranges) as reading:
        until(lambda: not reading._thread.is_alive())
    assert announced == [(0, 10, STEP), (0, 3 * STEP, 5), (1, 3 * STEP + 5, 7)]


def test_what_is_half_in_memory_is_announced_from_there_on(
    announced: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def is_cached(descriptor: int, position: int) -> bool:
        looked.append(position)
        return position < 30 * STEP

    monkeypatch.setattr(readahead, "_is_cached", is_cached)
    with ReadAhead([(0, 0, 34 * STEP)]) as reading:
        reading.advance(34 * STEP)
        until(lambda: not reading._thread.is_alive())
    assert announced == [(0, number * STEP, STEP) for number in range(30, 34)]
    assert len(looked) < 30  # of what is there, seldom


def test_the_end_does_not_wait_for_the_rest(announced: list[tuple[int, int, int]]) -> None:
    with ReadAhead([(0, 0, 3 * LEAD)]) as reading:
        until(lambda: reading._resting)
    assert sum(length for *_, length in announced) == LEAD


def test_what_is_in_memory_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * STEP))
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: told.append(call))
    with path.open("rb") as stream, ReadAhead([(stream.fileno(), 0, 3 * STEP)]) as reading:
        until(lambda: not reading._thread.is_alive())
    assert not told


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_where_it_is_not_known_what_is_in_memory(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    told: list[Any] = []
    monkeypatch.setattr(os, "preadv", refused)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: told.append(call))
    with ReadAhead([(0, 0, STEP)]) as reading:
        until(lambda: not reading._thread.is_alive())
    assert len(told) == 1


def test_a_disk_that_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def refused(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    state = {str(number): torch.rand(100_000) for number in range(10)}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "one")
        monkeypatch.setattr(checkpointer._reader, "_shared", True)  # one rank alone reads past the cache
        monkeypatch.setattr(readahead, "_is_cached", lambda descriptor, position: False)
        monkeypatch.setattr(os, "posix_fadvise", refused)
        found = checkpointer.load(tmp_path / "one")
    assert caplog.text.count("reads are not announced to the disk, which refuses that ([Errno 22]") == 1
    assert all(torch.equal(found[key], value) for key, value in state.items())
