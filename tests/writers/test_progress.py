"""Whoever writes an image that is still being filled gets its bytes when they are there, or learns that they never are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_futures

import pytest

from ckpt_component.writing.progress import FilledSource, ImageIncompleteError, Progress

SIZE = 1 << 20
TRACKS = [(0, SIZE // 2), (SIZE // 2, SIZE)]


class Pair:
    """Both ends in this process, and the image between them."""

    def __init__(self, seconds: float = 30, parent: int | None = None) -> None:
        self.image = bytearray(SIZE)
        self.progress = Progress(TRACKS)
        self.seconds = seconds
        self.parent = os.getppid() if parent is None else parent
        self.pipes: list[int] = []

    def follow(self) -> FilledSource:
        self.pipes.append(self.progress.follow())
        until = time.monotonic() + self.seconds
        return FilledSource(memoryview(self.image), TRACKS, self.pipes[-1], until, self.parent)

    def fill(self, track: int, until: int) -> None:
        start, _ = TRACKS[track]
        self.image[start:until] = b"x" * (until - start)
        self.progress.reached(track, until)

    def close(self) -> None:
        self.progress.leave()
        for pipe in self.pipes:
            os.close(pipe)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_bytes_are_given_when_they_are_there(pair: Pair) -> None:
    with ThreadPoolExecutor(3) as pool:
        source = pair.follow()
        first = pool.submit(source.buffers, 0, 100_000)
        second = pool.submit(source.buffers, SIZE // 2, SIZE // 2 + 100_000)
        across = pool.submit(source.buffers, SIZE // 2 - 4096, SIZE // 2 + 4096)
        assert not wait_futures([first, second, across], timeout=0.2).done
        pair.fill(1, SIZE // 2 + 200_000)
        assert bytes(second.result(10)[0]) == b"x" * 100_000
        assert not wait_futures([first, across], timeout=0.2).done
        pair.fill(0, 200_000)
        assert bytes(first.result(10)[0]) == b"x" * 100_000
        assert not wait_futures([across], timeout=0.2).done
        pair.fill(0, SIZE // 2)
        assert bytes(across.result(10)[0]) == b"x" * 8192
        whole = pool.submit(source.wait_whole)
        pair.fill(1, SIZE)
        assert not wait_futures([whole], timeout=0.2).done  # a tensor may turn out to have changed
        pair.progress.end(whole=True)
        whole.result(10)


def test_an_image_that_failed_is_known_to_all_who_wait(pair: Pair) -> None:
    with ThreadPoolExecutor(3) as pool:
        source = pair.follow()
        waiting = [pool.submit(source.buffers, start, start + 4096) for start in (0, 8192, SIZE // 2)]
        assert not wait_futures(waiting, timeout=0.2).done
        pair.progress.end(whole=False)
        for each in waiting:
            with pytest.raises(ImageIncompleteError, match="failed"):
                each.result(10)
        with pytest.raises(ImageIncompleteError):
            source.wait_whole()


def test_a_forked_process_that_holds_the_pipe_open_hides_no_failure(pair: Pair) -> None:
    source = pair.follow()
    assert pair.progress._pipe is not None
    pair.pipes.append(os.dup(pair.progress._pipe))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.wait_whole)
        pair.progress.end(whole=False)
        with pytest.raises(ImageIncompleteError, match="failed"):
            waiting.result(5)


def test_a_pipe_that_ends_is_a_trainer_that_is_gone(pair: Pair) -> None:
    source = pair.follow()
    pair.fill(0, SIZE // 2)
    pair.progress.leave()
    assert len(source.buffers(0, SIZE // 2)[0]) == SIZE // 2
    with pytest.raises(ImageIncompleteError, match="trainer is gone"):
        source.wait_whole()


def test_what_was_filled_can_still_be_had_when_the_rest_has_failed(pair: Pair) -> None:
    source = pair.follow()
    pair.fill(0, 300_000)
    pair.progress.end(whole=False)
    assert bytes(source.buffers(0, 4096)[0]) == b"x" * 4096
    with pytest.raises(ImageIncompleteError):
        source.wait_whole()


@pytest.mark.parametrize("whole", [True, False])
def test_who_comes_late_learns_all_that_was_told_before(pair: Pair, whole: bool) -> None:
    pair.fill(0, 300_000)
    assert len(pair.follow().buffers(0, 200_000)[0]) == 200_000
    pair.progress.leave()
    pair.fill(1, SIZE)
    again = pair.follow()
    assert len(again.buffers(SIZE // 2, SIZE)[0]) == SIZE // 2
    pair.progress.end(whole)
    last = pair.follow()
    if whole:
        again.wait_whole()
        last.wait_whole()
        assert len(last.buffers(0, SIZE)[0]) == SIZE
    else:
        for source in (again, last):
            with pytest.raises(ImageIncompleteError):
                source.wait_whole()


def test_telling_never_waits_for_who_follows(pair: Pair) -> None:
    source = pair.follow()
    for mark in range(1, SIZE // 2 + 1, 7):
        pair.progress.reached(0, mark)
        pair.progress.reached(1, mark + SIZE // 2)
    pair.progress.end(whole=True)
    # The smallest pipe that the system may give holds a page.
    assert len(os.read(pair.pipes[-1], 1 << 20)) <= 4096
    del source


def test_who_follows_may_go_away(pair: Pair) -> None:
    pair.follow()
    os.close(pair.pipes.pop())
    pair.fill(0, 200_000)
    pair.progress.end(whole=True)


@pytest.mark.parametrize(("seconds", "parent", "why"), [(0.2, None, "in time"), (30, 1 << 30, "trainer is gone")])
def test_nobody_waits_for_ever(seconds: float, parent: int | None, why: str) -> None:
    pair = Pair(seconds, parent)
    try:
        with pytest.raises(ImageIncompleteError, match=why):
            pair.follow().wait_whole()
    finally:
        pair.close()
