"""Ranks that are late, hang or die while others decide, on simulated time: none continues without the others."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from simulated_ranks import Ask, after, outcomes

from ckpt_component import CheckpointError, CheckpointTimeoutError, RanksError
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.testing.simulated_store import MessageFault

seeds = pytest.mark.parametrize("seed", range(20))
#: A seed decides how many ranks there are, too.
worlds = pytest.mark.parametrize(("seed", "world_size"), [(seed, 2 + seed % 3) for seed in range(20)])


def first(ranks: StoreCoordinator) -> None:
    """All take part in this one, and then time passes."""
    ranks.decide("before", 1, sum, after(ranks, 30.0))
    ranks.outside.sleep(5.0)


@worlds
def test_a_rank_that_gives_up_keeps_a_late_rank_0_from_deciding(seed: int, world_size: int) -> None:
    decided: list[int] = []

    def ask(ranks: StoreCoordinator) -> None:
        if ranks.is_leader:
            ranks.outside.sleep(5.0)
        ranks.decide("late", 1, decided.extend, after(ranks, 30.0 if ranks.is_leader else 0.5))

    found = outcomes(seed, world_size, ask)
    assert not decided and len(found) == world_size
    assert all(isinstance(error, CheckpointTimeoutError) for error in found.values())
    assert all("rank 0 to take part in 'late'" in str(error) for error in found.values()), found


@worlds
def test_a_rank_that_does_not_come_is_named_at_the_deadline(seed: int, world_size: int) -> None:
    missing = world_size - 1

    def ask(ranks: StoreCoordinator) -> Any:
        if ranks.rank < missing:
            ranks.decide("save/1", None, len, after(ranks, 5.0))
        ranks.outside.sleep(30.0)

    found = outcomes(seed, world_size, ask)
    assert all(isinstance(found[rank], CheckpointTimeoutError) for rank in range(missing)), found
    assert all(f"rank {missing} to take part in 'save/1'" in str(found[rank]) for rank in range(missing)), found


@worlds
def test_a_rank_whose_time_is_up_waits_for_a_decision_that_rank_0_has_begun(seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        def decide(said: list[int]) -> int:
            ranks.outside.sleep(5.0)
            return sum(said)

        return ranks.decide("slow", 1 + ranks.rank, decide, after(ranks, 30.0 if ranks.is_leader else 0.5))

    assert outcomes(seed, world_size, ask) == dict.fromkeys(range(world_size), sum(range(1, world_size + 1)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_that_dies_while_it_gives_up_leaves_no_rank_waiting(world_size: int) -> None:
    """Also between its request that closes the question and the one that answers it."""
    last = world_size - 1

    def ask(ranks: StoreCoordinator) -> Any:
        if ranks.is_leader:
            ranks.outside.sleep(3.0)
        return ranks.decide("late", 1, sum, after(ranks, 0.5 if ranks.rank == last else 30.0))

    errors = Counter[str]()
    for number in range(1, 40 * world_size):
        found = outcomes(1, world_size, ask, faults={number: MessageFault("killed")})
        if found.keys() == {*range(last)}:
            # Its value counts if it has posted that.
            assert found[0] == world_size or isinstance(found[0], CheckpointError), (number, found)
            errors[str(found[0])] += 1
    # It had not begun, it had closed the question and not answered it, or it had given it up.
    waits = (f"rank {last} to take part in 'late'", "rank 0 to decide 'late'", "rank 0 to take part in 'late'")
    assert errors.keys() == {f"{world_size}", *(f"Timed out waiting for {wait}." for wait in waits)}, errors


@worlds
def test_ranks_that_fail_shortly_after_the_first_are_named_too(seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        def work() -> int:
            ranks.outside.sleep(0.05 * ranks.rank)
            if ranks.rank:
                raise OSError(5, f"of rank {ranks.rank}")
            return 1

        return ranks.all_succeed("vote", work, lambda: 0, after(ranks, 60.0))

    found = outcomes(seed, world_size, ask)
    assert all({*error.failures} == {*range(1, world_size)} and error.errno == 5 for error in found.values()), found


def vote(ranks: StoreCoordinator) -> Any:
    return ranks.all_succeed("vote", lambda: 1, lambda: 0, after(ranks, 120.0))


def decide(ranks: StoreCoordinator) -> Any:
    return ranks.decide("next", 1, sum, after(ranks, 120.0))


def act(ranks: StoreCoordinator) -> Any:
    return ranks.run_on_leader("act", lambda: 1, after(ranks, 120.0))


def then(call: Ask, ranks: StoreCoordinator) -> Any:
    first(ranks)
    return call(ranks)


@worlds
@pytest.mark.parametrize(
    ("call", "dead"),
    [(vote, -1), (vote, 0), (decide, 1), (decide, 0), (act, 0)],
    ids=lambda it: getattr(it, "__name__", None),
)
def test_a_dead_rank_is_named_when_its_heartbeats_stop(seed: int, world_size: int, call: Ask, dead: int) -> None:
    dead %= world_size
    found = outcomes(seed, world_size, partial(then, call), {dead: 3.0})
    assert found.keys() == {*range(world_size)} - {dead}
    assert all(isinstance(error, RanksError) and {*error.failures} == {dead} for error in found.values()), found
    assert all("heartbeat" in str(error) for error in found.values()), found
    assert all(error.causes == {dead: "RanksError"} for error in found.values())  # it will not take part in a retry


@worlds
def test_ranks_that_die_together_are_named_together(seed: int, world_size: int) -> None:
    dead = {1, world_size - 1}
    found = outcomes(seed, world_size, partial(then, vote), dict.fromkeys(dead, 3.0))
    assert all({*error.failures} == dead == {*error.causes} for error in found.values()), found


def voted(world_size: int) -> dict[int, list[None]]:
    """What the ranks get of a vote: rank 0 all votes, which have no value here, the others nothing."""
    return {0: [None] * world_size, **{rank: [] for rank in range(1, world_size)}}


@worlds
def test_a_rank_that_lives_and_writes_nothing_hangs(seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        work = partial(ranks.outside.sleep, 90.0 if ranks.rank == 1 else 0.0)
        return ranks.all_succeed("vote", work, lambda: 7, after(ranks, 120.0))

    found = outcomes(seed, world_size, ask)
    assert all(isinstance(error, RanksError) and "timeouts.stall" in error.failures[1] for error in found.values()), (
        found
    )
    assert all(error.causes == {1: "CheckpointTimeoutError"} for error in found.values())


@worlds
def test_a_rank_that_writes_slowly_does_not_hang(seed: int, world_size: int) -> None:
    def ask(ranks: StoreCoordinator) -> Any:
        work = partial(ranks.outside.sleep, 90.0 if ranks.rank == 1 else 0.0)
        return ranks.all_succeed("vote", work, lambda: int(ranks.outside.now()), after(ranks, 120.0))

    assert outcomes(seed, world_size, ask) == voted(world_size)


@worlds
def test_a_rank_that_writes_slowly_does_not_hang_because_another_write_has_ended(seed: int, world_size: int) -> None:
    """The image of a newer save may become whole in memory while an older one is written."""

    def ask(ranks: StoreCoordinator) -> Any:
        def another() -> None:
            ranks.outside.sleep(5.0)
            ranks.all_succeed("another vote", lambda: 1, lambda: 0, after(ranks, 120.0))

        thread = ranks.outside.start("another", another)
        work = partial(ranks.outside.sleep, 90.0 if ranks.rank == 1 else 0.0)
        votes = ranks.all_succeed("vote", work, lambda: int(ranks.outside.now()), after(ranks, 120.0))
        thread.join(120.0)
        return votes

    assert outcomes(seed, world_size, ask) == voted(world_size)
