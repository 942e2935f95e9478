"""A wait that lasts is shown: for whom, and until when."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest

from ckpt_component.core.waits import LongWait, Waits


class Time:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def date(self) -> float:
        return 1e9 + self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def waits(time: Time) -> Waits:
    return Waits(time.now, time.date)


def lasting(time: Time, seconds: float) -> Callable[[float], bool]:
    """What takes so many seconds, in calls that have a timeout."""
    left = [seconds]

    def wait(timeout: float) -> bool:
        taken = min(timeout, left[0])
        time.seconds, left[0] = time.seconds + taken, left[0] - taken
        return left[0] == 0

    return wait


def test_a_short_wait_is_told_to_nobody(time: Time, waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    told = list[LongWait]()
    waits.tell(told.append)
    with caplog.at_level(logging.INFO), waits.on("rank 3", 160.0) as wait:
        assert wait.for_all(lasting(time, 4.0))
        wait.look()
    assert not told and not caplog.text and not waits.long()


def test_a_long_one_is_logged_once_shown_while_it_lasts_and_told_twice(
    time: Time, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    told = list[LongWait]()
    end = waits.tell(told.append)
    with caplog.at_level(logging.INFO), waits.on(lambda: "rank 3, which has not voted", 160.0) as wait:
        for _ in range(20):
            time.seconds += 1.0
            wait.look()
        assert caplog.messages == ["waiting for rank 3, which has not voted, for at most 55 s more"]
        shown = LongWait("rank 3, which has not voted", 1e9 + 100, 1e9 + 160)
        assert waits.long() == [shown] == told
    assert not waits.long() and told[1] == LongWait(shown.whom, shown.since, shown.until, ended=1e9 + 120)
    assert told[1].plain() == {
        "for": "rank 3, which has not voted",
        "since": 1e9 + 100,
        "until": 1e9 + 160,
        "ended": 1e9 + 120,
    }
    end()
    with waits.on("rank 3") as wait:
        time.seconds += 6.0
        wait.look()
    assert len(told) == 2


@pytest.mark.parametrize(("seconds", "ended", "shown"), [(3.0, True, 0), (30.0, True, 1), (90.0, False, 1)])
def test_a_wait_in_one_call_ends_at_its_deadline(
    time: Time, waits: Waits, seconds: float, ended: bool, shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), waits.on("a process", 160.0) as wait:
        assert wait.for_all(lasting(time, seconds)) is ended
    assert time.seconds == min(100 + seconds, 160) and len(caplog.messages) == shown


def test_a_deadline_before_it_would_be_shown(time: Time, waits: Waits) -> None:
    with waits.on("a process", 102.0) as wait:
        assert not wait.for_all(lasting(time, 9.0))
    assert time.seconds == 102.0


def test_one_without_a_deadline(time: Time, waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), waits.on("the uploads of another run", math.inf) as wait:
        assert wait.for_all(lasting(time, 90.0))
    assert caplog.messages == ["waiting for the uploads of another run, without a deadline"]
