"""Policies on two ranks: what becomes of a save becomes of it on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from strides import in_turn

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "policies.py"


@pytest.mark.turns(3)
@pytest.mark.parametrize("function", in_turn(["retried", "warned", "stalled", "late"], 2))
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)


def test_a_manager_that_nobody_closes_outlives_its_process_group_without_a_word(tmp_path: Path) -> None:
    for output in run_ranks(SCRIPT, "group_is_gone", 2, tmp_path, whole=True):
        assert output.strip().splitlines()[-1] == "the last line", output
        assert "Traceback" not in output and "Error" not in output
