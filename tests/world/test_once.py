"""A run goes on whatever happens once, to one rank and to several; a third of these lives is lived for each commit."""

from __future__ import annotations

import pytest
from evidence import Record
from strides import in_turn
from world.cases import every_place, once, once_each, some, wrong_in
from world.world import Case

CASES = [*once_each()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("storage", "hosts", "script", "kind"), CASES)
def test_a_run_goes_on_whatever_happens_once(
    storage: str, hosts: str, script: str, kind: str, record_property: Record
) -> None:
    cases = [*once(kind, storage, hosts, script, 1)]
    record_property("lives", len(cases))
    wrong = wrong_in(cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("storage", ("disk", "mounted", "bucket"))
@pytest.mark.parametrize("kind", ["power_cut", "answer_lost", "fails", "is_full"])
@pytest.mark.parametrize("half", in_turn((0, 1), 2))
def test_a_run_goes_on_whatever_happens_at_every_operation(
    half: int, kind: str, storage: str, record_property: Record
) -> None:
    places = [*every_place(kind, storage, "a", "train")][half::2]
    cases = [Case(storage, "a", "train", (trouble,)) for trouble in places]
    record_property("lives", len(cases))
    wrong = wrong_in(cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("storage", ("disk", "mounted"))
@pytest.mark.parametrize("kind", ["power_cut", "answer_lost"])
def test_what_is_acknowledged_lasts(kind: str, storage: str) -> None:
    wrong = wrong_in(once(kind, storage, "a", "train", 10))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("storage", "hosts", "script", "kind"), some(CASES, 10))
def test_some_runs_go_on_whatever_happens_once(storage: str, hosts: str, script: str, kind: str) -> None:
    wrong = wrong_in(once(kind, storage, hosts, script, 1))
    assert not wrong, "\n".join(wrong)
