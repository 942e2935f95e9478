"""The reference classes on two ranks: one order, one answer, one error, and no wait for a dead rank."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ranks import finish_ranks, run_ranks, start_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "rank_calls.py"


@pytest.mark.turns(3)
def test_two_ranks_report_the_same_whatever_happens(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "queues", 2, tmp_path, timeout=100)
    here, there = (json.loads((tmp_path / f"texts.{rank}").read_text()) for rank in (0, 1))
    assert here == there and len(here) > 10


@pytest.mark.turns(3)
def test_a_rank_may_have_a_queue_of_its_own(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "own_queue", 2, tmp_path, timeout=60)


@pytest.mark.turns(3)
@pytest.mark.parametrize("gone", [0, 1])
def test_a_dead_rank_is_an_error_and_no_wait(gone: int, tmp_path: Path) -> None:
    (tmp_path / "gone").write_text(str(gone))
    results = finish_ranks(start_ranks(SCRIPT, "dead_rank", 2, tmp_path), timeout=60)
    outputs = [result.output for result in results]
    assert results[gone].code == -9 and results[1 - gone].code == 0, outputs
    assert "raised: " in outputs[1 - gone] and re.search("considered dead|has ended", outputs[1 - gone]), outputs
