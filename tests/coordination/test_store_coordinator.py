"""Ranks agree over a store: simulated by threads, each with a connection of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from rank_threads import on_all
from torch.distributed import TCPStore

from ckpt_component.core.coordination import LocalCoordinator, RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import another_connection
from ckpt_component.errors import CheckpointExistsError, CheckpointSaveError, RanksError


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def coordinators(store: TCPStore, world_size: int, **timeouts: float) -> list[StoreCoordinator]:
    return [
        StoreCoordinator(RankStore(another_connection(dist, store), rank, world_size, "test/"), **timeouts)
        for rank in range(world_size)
    ]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_pool_gives_every_rank_the_decision_made_from_all(store: TCPStore) -> None:
    ranks = coordinators(store, 5)

    def ask(coordinator: StoreCoordinator) -> list[int]:
        return [coordinator.decide(f"sum/{n}", coordinator.rank * (n + 1), sum, soon()) for n in range(4)]

    assert on_all(ranks, ask) == [[10, 20, 30, 40]] * 5


def test_deal_gives_every_rank_its_own_part_and_no_other(store: TCPStore) -> None:
    ranks = coordinators(store, 4)

    def ask(coordinator: StoreCoordinator) -> list[str]:
        return [coordinator.scatter(f"deal/{n}", coordinator.rank, _parts, soon()) for n in range(3)]

    assert on_all(ranks, ask) == [[f"{rank} of 4"] * 3 for rank in range(4)]
    # Each took its part away; the keys of the last questions are the only ones left.
    assert store.num_keys() < 40 and not any(store.check([f"test/deal/{n}/part/1"]) for n in range(3))

    def refuse(said: list[int]) -> list[str]:
        raise CheckpointSaveError(f"{said} is too much")

    found = on_all(ranks, lambda c: c.scatter("no", c.rank, refuse, soon()))
    assert {str(error) for error in found} == {"[0, 1, 2, 3] is too much"}
    assert LocalCoordinator().scatter("one", 0, _parts, soon()) == "0 of 1"


def _parts(said: list[int]) -> list[str]:
    return [f"{rank} of {len(said)}" for rank in said]


def test_errors_tell_the_kind_of_each_ranks_failure_and_huge_ones_are_cut(store: TCPStore) -> None:
    ranks = coordinators(store, 2)

    def work(coordinator: StoreCoordinator) -> None:
        if coordinator.rank == 1:
            raise CheckpointSaveError("x" * 5_000_000, 28)

    found = on_all(ranks, lambda rank: rank.all_succeed("huge", lambda: work(rank), lambda: 0, soon()))
    for error in found:
        assert isinstance(error, RanksError) and error.causes == {1: "CheckpointSaveError"} and error.errno == 28
        assert len(str(error)) < 50_000 and "more characters in the log of that rank" in str(error)


def test_what_the_leading_rank_raises_comes_as_the_same_error_everywhere(store: TCPStore) -> None:
    def refuse() -> None:
        raise CheckpointExistsError("it is taken")

    found = on_all(coordinators(store, 3), lambda c: c.run_on_leader("begin", refuse, soon()))
    assert [type(error) for error in found] == [CheckpointExistsError] * 3
    assert {str(error) for error in found} == {"it is taken"}

    def break_down() -> None:
        raise OSError(28, "No space left on device")

    found = on_all(coordinators(store, 3), lambda c: c.run_on_leader("other", break_down, soon()))
    assert isinstance(found[0], OSError)
    assert all(isinstance(error, CheckpointSaveError) and error.errno == 28 for error in found[1:])


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1, 3}])
def test_a_failed_part_fails_the_vote_on_all_ranks_with_the_same_names(store: TCPStore, failing: set[int]) -> None:
    def part(rank: int) -> str:
        if rank in failing:
            raise CheckpointSaveError(f"disk {rank} is full", 28)
        return f"wrote {rank}"

    ranks = coordinators(store, 4)
    found = on_all(ranks, lambda c: c.all_succeed("v1", lambda: part(c.rank), lambda: 0, soon()))
    assert all(isinstance(error, RanksError) and error.errno == 28 for error in found)
    assert len({str(error) for error in found}) == 1
    assert set(found[0].failures) <= failing and found[0].failures
    for rank in failing:
        assert isinstance(found[rank].__cause__, CheckpointSaveError)
    failing.clear()
    assert on_all(ranks, lambda c: c.all_succeed("v2", lambda: part(c.rank), lambda: 0, soon())) == [
        [f"wrote {rank}" for rank in range(4)],
        [],
        [],
        [],
    ]


def test_a_store_that_is_gone_is_said_so() -> None:
    master = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    coordinator = StoreCoordinator(RankStore(another_connection(dist, master), 1, 2, "test/"))
    assert coordinator._store().peek("nothing") is None
    del master
    with pytest.raises(RanksError, match="cannot reach the store"):
        coordinator.decide("save/1", None, len, soon(5.0))


def test_questions_are_removed_once_all_have_read_the_answer(store: TCPStore) -> None:
    ranks = coordinators(store, 4)
    found = on_all(ranks, lambda c: [c.decide(f"q/{number}", 1, sum, soon()) for number in range(20)])
    assert found == [[4] * 20] * 4
    assert store.num_keys() < 40


@pytest.mark.turns(3)
@pytest.mark.slow
def test_200_ranks_vote_commit_and_abort_and_the_cost_grows_with_the_ranks(
    store: TCPStore, record_property: Callable[[str, object], None]
) -> None:
    """Bounds calls to the store, which hardly depend on how fast this machine is; reports seconds too."""
    lines = [
        another_connection(dist, store) for _ in range(20)
    ]  # ten ranks share one; each call is over in microseconds
    everybody = [_Connection(lines[rank % len(lines)]) for rank in range(200)]

    def save(c: StoreCoordinator, name: str, fails: bool) -> Any:
        c.decide(f"{name}/agree", c.rank, max, soon(60))
        c.run_on_leader(f"{name}/begin", lambda: None, soon(60))

        def part() -> int:
            if fails and c.rank == 17:
                raise CheckpointSaveError("rank 17 is broken")
            return c.rank

        return c.all_succeed(f"{name}/vote", part, lambda: 0, soon(60))

    def saves_of(world_size: int) -> None:
        connections = everybody[:world_size]
        ranks = [
            StoreCoordinator(RankStore(connection, rank, world_size, f"{world_size}/"))
            for rank, connection in enumerate(connections)
        ]
        good = [list(range(world_size)), *([] for _ in range(world_size - 1))]
        assert on_all(ranks, lambda c: save(c, "warm-up", False)) == good
        said, asked = [[getattr(c, which) for c in connections] for which in ("said", "asked")]
        started, used = time.perf_counter(), time.process_time()
        assert on_all(ranks, lambda c: save(c, "good", False)) == good
        seconds, used = time.perf_counter() - started, time.process_time() - used
        said, asked = (
            [getattr(c, which) - before for c, before in zip(connections, befores, strict=True)]
            for which, befores in (("said", said), ("asked", asked))
        )
        found = on_all(ranks, lambda c: save(c, "bad", True))
        assert all(isinstance(error, RanksError) and set(error.failures) == {17} for error in found)
        for coordinator in ranks:
            coordinator.close()
        # A few messages a rank, whatever their number; each removes its own, and the leading one the rest.
        assert sorted(said)[-2] <= 10 and said[0] <= 40, said
        # Nor does anyone ask more often than it waits for: at most five times a second, after a few quick ones.
        assert sum(asked) / world_size <= 60 + 20 * seconds
        cost = {
            "seconds": round(seconds, 3),
            "CPU ms a rank": round(1e3 * used / world_size, 2),
            "messages a rank": round(sum(said) / world_size, 1),
            "looks a rank": round(sum(asked) / world_size, 1),
        }
        record_property(f"a save of {world_size} ranks", cost)
        print(f"a save of {world_size} ranks: {cost}")

    for world_size in (50, 100, 200):
        saves_of(world_size)


class _Connection:
    """A connection that counts its calls, apart from heartbeats; its clones are itself.

    Connecting looks names up, which takes seconds now and then where no name server answers.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.said = 0
        self.asked = 0

    def clone(self) -> _Connection:
        return self

    def set(self, key: str, value: bytes) -> None:
        self.said += "beat/" not in key
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.said += amount != 0
        self.asked += amount == 0
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        self.said += 1
        return bool(self._store.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        self.asked += 1
        return bytes(self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return list(self._store.multi_get(keys))
