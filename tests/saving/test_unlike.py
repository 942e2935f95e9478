"""What differs by rank and is stored once is noticed and named, once; what may differ, or does not, is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "unlike.py"


@pytest.mark.slow
def test_every_kind_of_value_that_differs_is_named_and_no_other(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "all_kinds", 2, tmp_path)
    text = "4 values differ by rank, and only one rank's value is saved: 'seed.numpy', 'rng', 'drifted', 'scalar'. "
    assert told[0].count("differ by rank") == 1 and text + "Wrap what every rank" in told[0], told[0]
    assert "PerRank(" in told[0] and "differ" not in told[1]


@pytest.mark.slow
def test_values_that_part_later_are_noticed_by_the_first_rank_that_has_them(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "later", 3, tmp_path)
    text = "'here' (rank 0, rank 1 and rank 2 differ; which of them is right is unknown). The memory of a rank may be"
    assert "1 value differs by rank but was equal at an earlier save" in told[0] and text in told[0], told[0]
    assert "'there.y'" in told[1] and "'there.x'" in told[1] and "differ" not in told[2]


@pytest.mark.slow
def test_of_very_many_values_some_are_looked_at_each_time_and_ten_are_named(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "many", 2, tmp_path)
    assert "12 values differ by rank" in told[0] and "'u9' and 2 more. " in told[0] and "'u10'" not in told[0]


@pytest.mark.slow
def test_ddp_and_fsdp_states_are_alike_and_the_statistics_of_an_ignored_module_are_not(tmp_path: Path) -> None:
    told = run_ranks(SCRIPT, "modules", 2, tmp_path)
    assert "'model.1.running_mean', 'model.1.running_var'" in told[0], told[0]
    assert told[0].count("differ by rank") == 1
