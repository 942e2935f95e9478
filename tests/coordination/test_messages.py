"""Requests to the store that break the connection or come late, on simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_ranks import after, outcomes
from strides import in_turn

from ckpt_component import CheckpointError, CheckpointSaveError, RanksError
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.coordination.store_coordinator import PolledCoordinator
from ckpt_component.testing.simulated_store import MessageFault, SimulatedStore
from ckpt_component.testing.simulation import Simulation

breaks = pytest.mark.parametrize("kind", ["lost", "unanswered"])
worlds = pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
#: More than the requests of a question of two ranks, and of the heartbeats beside it.
REQUESTS = 60


def on_a_rank(call: Callable[..., Any], *faults: MessageFault, ranks: int = 1) -> Any:
    """What a process that makes the calls of the first of two ranks, or of both, gets.

    A key has a value, and then the faults happen to the next requests.
    """
    simulation, found = Simulation(1), list[Any]()
    process = simulation.process("rank 0")
    store = SimulatedStore(simulation.process("agent"), {2 + number: fault for number, fault in enumerate(faults)})

    def run() -> None:
        connections = [
            StoreConnection(store.connect(process), 60.0, opens=False, outside=process.outside) for _ in "01"
        ]
        stores = [RankStore(connection, rank, 2, "run/") for rank, connection in enumerate(connections)]
        stores[0].set("key", b"value")
        found.append(call(*stores[:ranks]))

    process.start(run)
    assert simulation.run(200.0)
    return found[0]


CALLS: dict[str, tuple[Callable[[RankStore], Any], Any]] = {
    "set": (lambda ranks: [ranks.set("key", b"new"), ranks.peek("key")][1], b"new"),  # type: ignore[func-returns-value]
    "peek": (lambda ranks: ranks.peek("key"), b"value"),
    "has": (lambda ranks: ranks.has("key"), True),
    "read": (lambda ranks: ranks.read(["key"]), [b"value"]),
    "delete": (lambda ranks: [ranks.delete(["key"]), ranks.has("key")][1], False),  # type: ignore[func-returns-value]
    "a count that is read": (lambda ranks: ranks.add("count", 0), 0),
    "a count that may be too large": (lambda ranks: ranks.add("count", 1, repeatable=True) >= 1, True),
}


@breaks
@pytest.mark.parametrize("name", CALLS)
def test_a_request_that_may_be_made_twice_is_made_again(name: str, kind: str) -> None:
    call, answer = CALLS[name]
    assert on_a_rank(call, MessageFault(kind)) == answer


@breaks
def test_a_count_is_not_made_twice(kind: str) -> None:
    def call(ranks: RankStore) -> int:
        with pytest.raises(RanksError, match="connection to .* broke"):
            ranks.add("count", 1)
        return ranks.add("count", 0)

    assert on_a_rank(call, MessageFault(kind)) == (kind == "unanswered")


def test_no_values_are_read_without_a_request() -> None:
    assert on_a_rank(lambda ranks: ranks.read([])) == []


@breaks
@worlds
def test_a_decision_outlives_a_broken_connection_unless_a_count_is_uncertain(world_size: int, kind: str) -> None:
    """That of a post that did not arrive, of any rank; or that of rank 0's post, or who closed the question."""

    def ask(ranks: StoreCoordinator) -> tuple[int, str, float]:
        began, decision, text = ranks.outside.now(), 0, ""
        try:
            decision = ranks.decide("next", 1, sum, after(ranks, 30.0))
        except CheckpointError as error:
            text = str(error)
        return decision, text, ranks.outside.now() - began

    uncertain = 0
    for fault in range(1, REQUESTS * world_size // 2):
        found = outcomes(1, world_size, ask, faults={fault: MessageFault(kind)}).values()
        assert all(seconds < 15.0 for *_, seconds in found), (fault, found)
        if {decision for decision, *_ in found} != {world_size}:
            uncertain += 1
            for decision, text, _ in found:
                assert not decision and ("broke" in text or text == "Timed out waiting for rank 0 to decide 'next'."), (
                    fault,
                    found,
                )
    assert uncertain == (2 if kind == "unanswered" else world_size)


@worlds
def test_a_vote_that_did_not_arrive_is_a_failure_at_once(world_size: int) -> None:
    """Not only at the deadline: the rank lives, and its heartbeats go on."""
    failed = 0
    for fault in range(1, REQUESTS * world_size // 2):
        faults = dict.fromkeys((fault, fault + 1), MessageFault("lost"))
        found: dict[int, Any] = outcomes(1, world_size, voting, faults=faults)
        assert all(seconds < 15.0 for _, seconds in found.values()), (fault, found)
        failed += any(error is not None for error, _ in found.values())
    assert failed >= 2


def voting(ranks: StoreCoordinator) -> tuple[CheckpointError | None, float]:
    began, error = ranks.outside.now(), None
    try:
        ranks.all_succeed("vote", lambda: 1, lambda: 0, after(ranks, 120.0))
    except CheckpointError as raised:
        error = raised
    return error, ranks.outside.now() - began


@pytest.mark.parametrize("world_size", [2, *in_turn([3, 4], 2)])
def test_a_question_that_a_rank_withdrew_late_is_removed(world_size: int) -> None:
    """The store answers that rank only when rank 0 has decided, or given up, and has asked further questions."""

    def ask(ranks: StoreCoordinator) -> bool:
        error = None
        try:
            ranks.decide("late", 1, sum, after(ranks, 5.0))
        except CheckpointError as raised:
            error = raised
            ranks.outside.sleep(60.0)
        for number in range(3):
            assert ranks.decide(f"next/{number}", 1, sum, after(ranks, 120.0)) == world_size
        return "has not answered" in str(error)

    withdrawn = 0
    for fault in range(1, REQUESTS * world_size // 2):
        left: dict[str, bytes] = {}
        blocked = outcomes(1, world_size, ask, faults={fault: MessageFault("late", 30.0)}, left=left)
        if not blocked[0] and any(blocked.values()):
            withdrawn += 1
            assert not [key for key in left if key.startswith("run/late/")], (fault, left)
    assert withdrawn > 5


def test_of_answers_that_nobody_reads_the_last_ones_stay() -> None:
    """A rank may be late to read them, or dead."""

    def call(store: RankStore) -> list[int]:
        ranks = PolledCoordinator(store, 10.0)
        for number in range(200):
            ranks.refuse(f"{number}", CheckpointSaveError("no"))
        ranks.close()
        return [number for number in range(200) if store.has(f"{number}/answer")]

    kept = on_a_rank(call)
    assert kept == [*range(kept[0], 200)] and 50 < len(kept) < 80


def test_what_all_ranks_have_left_is_removed_with_the_next_answer() -> None:
    def call(store: RankStore, others: RankStore) -> list[bool]:
        leader, other = PolledCoordinator(store, 10.0), PolledCoordinator(others, 10.0)
        looks = [ranks.look("look", 0, lambda: True, after(ranks, 10.0)) for ranks in (leader, other)]
        for ranks in (leader, other):
            ranks.leave("look")
        looks.append(store.has("look/answer"))
        leader.refuse("next", CheckpointSaveError("no"))
        leader.close()
        other.close()
        return [*looks, store.has("look/answer")]

    assert on_a_rank(call, ranks=2) == [True, True, True, False]
