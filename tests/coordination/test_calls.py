"""Calls that every rank must make, on simulated time: all get rank 0's answer, and who has not called is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from simulated_ranks import after, outcomes

from ckpt_component import CheckpointTimeoutError, RanksError
from ckpt_component.core.coordination import RankStore, StepQuestions, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.coordination.heartbeat import Place
from ckpt_component.testing.simulated_store import SimulatedStore
from ckpt_component.testing.simulation import Simulation

seeds = pytest.mark.parametrize("seed", range(5))
#: A seed decides how many ranks there are, too.
worlds = pytest.mark.parametrize(("seed", "world_size"), [(seed, 2 + seed % 3) for seed in range(6)])
LOGGER = "ckpt_component.coordination"


def answers(ranks: StoreCoordinator, questions: StepQuestions, steps: Sequence[int]) -> list[Any]:
    """What a rank gets for these steps; the errors as texts."""
    found: list[Any] = []
    for step in steps:
        try:
            found.append(questions.ask(step, lambda step=step: (ranks.rank, step), after(ranks, 30.0)))  # type: ignore[misc]
        except RanksError as error:
            found.append(str(error))
    return found


def of_rank_0(*steps: int) -> list[list[int]]:
    return [[0, step] for step in steps]


@seeds
def test_only_rank_0_is_asked_and_steps_it_alone_called_for_are_skipped(seed: int) -> None:
    called = {0: (1, 2, 3, 4), 1: (1, 2, 3, 4), 2: (3, 4)}

    def ask(ranks: StoreCoordinator) -> Any:
        return answers(ranks, StepQuestions(ranks, "maybe_save"), called[ranks.rank])

    found = outcomes(seed, 3, ask)
    assert {rank: [list(answer) for answer in got] for rank, got in found.items()} == {
        rank: of_rank_0(*steps) for rank, steps in called.items()
    }


@worlds
def test_a_step_that_rank_0_did_not_call_for_is_an_error_and_the_next_one_is_answered(
    seed: int, world_size: int
) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        called = (1, 4) if ranks.is_leader else (1, 2, 3, 4)
        return answers(ranks, StepQuestions(ranks, "maybe_save"), called)

    text = "maybe_save must be called on every rank; rank 0 did not for step {}: it is at step 4."
    found = outcomes(seed, world_size, ask)
    assert all(found[rank] == [[0, 1], text.format(2), text.format(3), [0, 4]] for rank in range(1, world_size)), found


@worlds
def test_after_a_restart_from_an_earlier_step_no_older_answer_counts(seed: int, world_size: int) -> None:
    called = {0: (1, 2, 3, 4), **dict.fromkeys(range(1, world_size), (1, 2))}

    def ask(ranks: StoreCoordinator) -> Any:
        questions = StepQuestions(ranks, "maybe_save")
        before = answers(ranks, questions, called[ranks.rank])
        questions.restart(1)
        return before, answers(ranks, questions, (2, 3))

    found = outcomes(seed, world_size, ask)
    assert all(found[rank] == (of_rank_0(1, 2), of_rank_0(2, 3)) for rank in range(1, world_size)), found


def late(seconds: float, *, goes_on: bool = False, world_size: int = 2) -> Callable[[StoreCoordinator], Any]:
    """All ranks save step 2; those above 0 call so much later, or go on to step 3 without the call."""

    def ask(ranks: StoreCoordinator) -> Any:
        ranks.at_step(1 if ranks.rank else 2)
        if ranks.rank:
            ranks.outside.sleep(seconds)
            ranks.at_step(3 if goes_on else 2)
            if goes_on:
                return ranks.outside.sleep(20.0)
        began = ranks.outside.now()
        try:
            return ranks.meet("save", 1, sum, after(ranks, 60.0))
        except RanksError as error:
            return error.failures, ranks.outside.now() - began, str(error)

    return ask


@worlds
def test_a_late_rank_is_waited_for_and_named_once(seed: int, world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    others = [*range(1, world_size)]
    assert outcomes(seed, world_size, late(25.0)) == dict.fromkeys([0, *others], world_size)
    (record,) = caplog.records
    assert record.getMessage().startswith("waiting for 10 s: save must be called on every rank; rank")
    assert f"{', '.join(map(str, others))} did not for step 2: " in record.getMessage()
    assert record.getMessage().endswith("it is at step 1" if world_size == 2 else f"rank {others[-1]} is at step 1")


@worlds
def test_no_rank_is_named_that_is_less_than_ten_seconds_late(
    seed: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    assert outcomes(seed, world_size, late(8.0)) == dict.fromkeys(range(world_size), world_size)
    assert not caplog.records


@worlds
def test_ranks_that_went_on_without_the_call_are_not_waited_for(seed: int, world_size: int) -> None:
    failures, seconds, text = outcomes(seed, world_size, late(5.0, goes_on=True))[0]
    assert failures and failures == dict.fromkeys(failures, "is at step 3") and seconds < 10.0, (failures, seconds)
    assert 0 not in failures and text.startswith("save must be called on every rank; rank") and "at step 3" in text
    if world_size == 2:
        assert text == "save must be called on every rank; rank 1 did not for step 2: it is at step 3."


@worlds
@pytest.mark.parametrize("name", ["save", "maybe_save"])
def test_rank_0_that_went_on_without_the_call_is_not_waited_for(name: str, seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        ranks.at_step(3 if ranks.is_leader else 2)
        if ranks.is_leader:
            return ranks.outside.sleep(20.0)
        began = ranks.outside.now()
        try:
            if name == "save":
                return ranks.meet("save", 1, sum, after(ranks, 60.0))
            return StepQuestions(ranks, name).ask(2, lambda: 1, after(ranks, 60.0))
        except RanksError as error:
            return error.failures, ranks.outside.now() - began, str(error)

    found = outcomes(seed, world_size, ask)
    for rank in range(1, world_size):
        failures, seconds, text = found[rank]
        assert failures == {0: "is at step 3"} and seconds < 10.0, (failures, seconds)
        assert text == f"{name} must be called on every rank; rank 0 did not for step 2: it is at step 3."


@pytest.mark.parametrize(("world_size", "more"), [(9, ""), (12, " (and 3 more)")])
def test_of_many_ranks_eight_are_named(world_size: int, more: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    outcomes(1, world_size, late(15.0))
    (record,) = (record for record in caplog.records if "waiting" in record.getMessage())
    assert f"ranks 1, 2, 3, 4, 5, 6, 7, 8{more} did not for step 2: rank 1 is at step 1," in record.getMessage()


@worlds
def test_a_rank_that_has_closed_its_manager_is_not_waited_for(seed: int, world_size: int) -> None:
    last = world_size - 1

    def ask(ranks: StoreCoordinator) -> Any:
        ranks.at_step(2)
        if ranks.rank == last:
            return ranks.close()
        return ranks.meet("save", 1, sum, after(ranks, 60.0))

    found = outcomes(seed, world_size, ask)
    text = f"save must be called on every rank; rank {last} did not for step 2: it has closed its manager."
    assert all(isinstance(found[rank], RanksError) and str(found[rank]) == text for rank in range(last)), found


def test_a_closed_rank_sends_no_heartbeats() -> None:
    simulation, requests = Simulation(1), list[int]()
    process = simulation.process("rank 0")
    store = SimulatedStore(process)

    def run() -> None:
        connection = StoreConnection(store.connect(process), 60.0, opens=False, outside=process.outside)
        ranks = StoreCoordinator(RankStore(connection, 0, 1, "run/"), 10.0, 30.0)
        for seconds in (0.1, 20.0):
            process.outside.sleep(seconds)
            requests.append(store.requests)
        ranks.close()
        for seconds in (0.1, 20.0):
            process.outside.sleep(seconds)
            requests.append(store.requests)

    process.start(run)
    assert simulation.run(60.0)
    assert requests[1] - requests[0] in (9, 10) and requests[2] == requests[1] + 1 == requests[3], requests


def test_the_place_of_a_rank_tells_whether_it_will_still_make_a_call() -> None:
    here = Place(0, 5)
    assert here.at(5) == here and here.at(6) == Place(0, 6) and Place().at(3) == Place(0, 3)
    assert here.at(3) == Place(1, 3)  # it went back: its steps come again
    assert here.at(6).is_past(here) and here.is_past(Place()) and Place(0, 0, closed=True).is_past(here) is True
    assert not here.is_past(here) and not here.is_past(here.at(3)) and not Place(1, 6).is_past(here)
    assert not Place().is_past(here)
    assert str(Place()) == "has not called the manager for any step" and str(here) == "is at step 5"


@worlds
def test_a_call_that_a_rank_gave_up_at_an_earlier_step_is_passed_over(seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        if ranks.is_leader:
            ranks.outside.sleep(10.0)
        else:
            ranks.at_step(1)
            with pytest.raises(CheckpointTimeoutError):
                ranks.meet("save", 1, sum, after(ranks, 2.0))
        ranks.at_step(2)
        return ranks.meet("save", 1, sum, after(ranks, 60.0)), ranks.meetings["save"]

    assert outcomes(seed, world_size, ask) == dict.fromkeys(range(world_size), (world_size, 2))


@worlds
def test_at_the_deadline_the_error_says_where_the_missing_rank_is(seed: int, world_size: int) -> None:
    last = world_size - 1

    def ask(ranks: StoreCoordinator) -> Any:
        ranks.at_step(2)
        if ranks.rank == last:
            return ranks.outside.sleep(40.0)
        return ranks.meet("save", 1, sum, after(ranks, 20.0))

    found = outcomes(seed, world_size, ask)
    text = f"save must be called on every rank; rank {last} did not for step 2: it is at step 2 too, and late."
    assert isinstance(found[0], CheckpointTimeoutError) and str(found[0]) == f"Timed out: {text}"
    assert all(isinstance(found[rank], CheckpointTimeoutError) for rank in range(last)), found
