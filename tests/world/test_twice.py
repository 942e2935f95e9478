"""A run of two ranks goes on whatever happens twice: each pair of troubles; a third of them for each commit."""

from __future__ import annotations

import pytest
from evidence import Record
from world.cases import some, twice, twice_each, wrong_in

CASES = [*twice_each()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("storage", "hosts", "script", "first", "second"), CASES)
def test_a_run_goes_on_whatever_happens_twice(
    storage: str, hosts: str, script: str, first: str, second: str, record_property: Record
) -> None:
    record_property("lives", 1)
    wrong = wrong_in(twice(first, second, storage, hosts, script, 1))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("storage", "hosts", "script", "first", "second"), some(CASES, 10))
def test_some_runs_go_on_whatever_happens_twice(storage: str, hosts: str, script: str, first: str, second: str) -> None:
    wrong = wrong_in(twice(first, second, storage, hosts, script, 1))
    assert not wrong, "\n".join(wrong)
