"""Rank 0, which holds the store of all ranks, is stopped: the others get an error in bounded time, not a hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks import finish_ranks, run_ranks, start_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "stopped_holder.py"


@pytest.mark.turns(3)
@pytest.mark.parametrize(("function", "world_size"), [("in_a_save", 3), ("in_a_wait", 2)])
def test_the_others_give_up_and_later_saves_are_committed(function: str, world_size: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, world_size, tmp_path)


def test_training_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "in_a_save_that_may_not_wait", 2, tmp_path)


def test_close_is_bounded(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "in_a_close", 2, tmp_path)


def test_build_is_bounded(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "at_build", 2, tmp_path)


@pytest.mark.turns(3)
def test_a_program_ends_although_a_call_is_not_answered(tmp_path: Path) -> None:
    ranks = start_ranks(SCRIPT, "at_the_end", 2, tmp_path, whole=True)
    try:
        (other,) = finish_ranks(ranks[1:], 90)
    finally:
        os.kill(ranks[0], signal.SIGKILL)
        finish_ranks(ranks[:1])
    assert other.code == 7, other.output
