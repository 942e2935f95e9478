"""The list of running saves, and what the caller of a save holds: no error is lost, none is raised twice."""

from __future__ import annotations

import threading
import time
from concurrent.futures import InvalidStateError
from typing import cast

import pytest

from ckpt_component import CheckpointSaveError, CheckpointTimeoutError, RanksError
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import SaveReport
from ckpt_component.saving.context import SaveRequest
from ckpt_component.saving.save_queue import InFlightSaves, SaveHandle

REPORT = cast(SaveReport, None)
ERROR = CheckpointSaveError("the disk is on fire")


def saves_of(*numbers: int) -> InFlightSaves:
    saves = InFlightSaves()
    saves.extend(SaveHandle(SaveRequest(f"/nowhere/{number}", FileStorage()), number) for number in numbers)
    return saves


def test_a_save_cannot_be_cancelled_so_it_always_has_an_end() -> None:
    [save] = saves_of(1)
    assert not save.cancel()
    save.end(REPORT)
    assert save.result(0) is REPORT
    with pytest.raises(InvalidStateError):
        save.end(REPORT)


def test_the_error_of_a_save_waits_until_it_is_delivered() -> None:
    saves = saves_of(1)
    saves[0].end(REPORT, ERROR)
    assert saves[0].undelivered is ERROR
    with pytest.raises(CheckpointSaveError, match="on fire"):
        saves.raise_first()
    assert saves[0].undelivered is None
    saves.raise_first()


def test_saves_that_have_ended_are_dropped_and_failed_ones_are_told_past_those_that_run() -> None:
    saves = saves_of(1, 2, 3, 4)
    running, committed, failed, seen = saves
    committed.end(REPORT)
    failed.end(REPORT, ERROR)
    seen.end(REPORT, ERROR, delivered=True)
    assert saves.drop_ended() == [(3, "the disk is on fire")]
    assert saves == [running, failed]
    assert saves.deliver_failed() == [failed]
    assert saves.drop_ended() == [] and saves == [running]


def test_what_another_rank_reports_as_failed_is_raised_once_here_whatever_became_of_it_here() -> None:
    saves = saves_of(1, 2, 3)
    committed, _, failed = saves
    committed.end(REPORT)
    failed.end(REPORT, ERROR)
    assert saves.error_of(3, "on another rank", 0.0) is ERROR
    for number in (1, 2, 4):
        error = saves.error_of(number, "on another rank", 0.0)
        assert isinstance(error, RanksError) and str(error) == "on another rank"
    saves[1].end(REPORT, ERROR)  # later than the error was raised in its place
    assert saves[1].undelivered is None
    saves.raise_first()


def test_a_wait_has_its_time_for_each_save_and_says_when_one_still_runs() -> None:
    saves = saves_of(1, 2, 3)
    saves[0].end(REPORT, ERROR)
    # Where nothing ends the wait, this does.
    ends = [threading.Timer(10.0, save.end, (REPORT,)) for save in saves[1:]]
    for timer in ends:
        timer.start()
    began = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match=r"A save was still running after 0\.1 s; see timeouts\.stage"):
        saves.wait(0.1)
    assert 0.2 <= time.monotonic() - began < 2.0
    for timer in ends:
        timer.cancel()
    saves[1].end(REPORT)
    saves[2].end(REPORT)
    saves.wait(0.1)
