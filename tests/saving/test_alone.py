"""One rank alone calls what all ranks must call: it is told within seconds, and later calls of all ranks work."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "alone.py"


@pytest.mark.turns(3)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_lone_save_is_told_who_did_not_call_and_the_ranks_stay_in_step(world_size: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, "a_lone_save", world_size, tmp_path)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "function", ["a_lone_save_often", "a_rank_has_closed", "a_lone_restore", "a_lone_prewarm", "a_lone_maybe_save"]
)
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)


@pytest.mark.turns(3)
def test_ranks_that_never_call_are_named_by_one_warning_and_at_the_deadline(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "the_others_never_call", 2, tmp_path)[0]
    assert told.count("save must be called on every rank; rank 1 did not for step 1") == 1


@pytest.mark.turns(3)
def test_a_heart_that_misses_beats_beats_on_and_one_that_stops_fails_the_next_save(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "a_heart_that_misses_beats", 2, tmp_path)
    assert told[1].count("rank 1 cannot send its heartbeat, retrying: the switch is on fire") == 1
    run_ranks(SCRIPT, "a_heart_that_stops", 2, tmp_path)
