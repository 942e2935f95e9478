"""`PeerSession` without processes: every rank a thread, the store a dictionary."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import eventually

from ckpt_component.compat import peers
from ckpt_component.compat.peers import PeerSession, ScheduledCall
from ckpt_component.core.coordination import RankStore
from ckpt_component.core.coordination.heartbeat import RESTING
from ckpt_component.errors import CheckpointSaveError, CheckpointTimeoutError, RanksError


class Store:
    """As a `torch.distributed` store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.gone = False
        #: What this store does not take, as if the rank that sends it were dead.
        self.refused: str | None = None

    def _locked(self, action: Callable[[], Any]) -> Any:
        with self.lock:
            if self.gone:
                raise RuntimeError("Connection reset by peer")
            return action()

    def set(self, key: str, value: bytes) -> None:
        if key == self.refused:
            return
        self._locked(lambda: self.values.__setitem__(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._locked(lambda: self.values[key]))

    def check(self, keys: list[str]) -> bool:
        return bool(self._locked(lambda: all(key in self.values for key in keys)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> None:
        self._locked(lambda: self.values.pop(key, None))

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            return value

        return int(self._locked(add))


class Connection(RankStore):
    def clone(self) -> RankStore:
        return self


def on_ranks(world_size: int, work: Callable[[PeerSession, int], Any], store: Store) -> list[Any]:
    """What `work` returned, or raised, by rank."""

    def run(rank: int) -> Any:
        session = PeerSession(Connection(store, rank, world_size, "test/"))
        try:
            return work(session, rank)
        except (CheckpointSaveError, CheckpointTimeoutError) as error:
            return error
        finally:
            session.rest()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def call(number: int = 0, timeout: float = 60, *, done: bool = True) -> ScheduledCall:
    made = ScheduledCall(f"Call {number}", timeout=timeout)
    if done:
        made.result.set_result(None)
    return made


def added(session: PeerSession, *calls: ScheduledCall) -> tuple[ScheduledCall, ...]:
    for each in calls:
        session.add(each)
    return calls


def answer(session: PeerSession, each: ScheduledCall, blocking: bool = True) -> Any:
    """What a look says: whether the call is done, or the ranks on which it failed."""
    try:
        return session.look(each, blocking)
    except RanksError as error:
        assert error.failures, error
        return dict(error.failures)


def keys_of(store: Store) -> set[str]:
    kept = ("/beat/", "/joined-by-", "/order/")
    return {key for key in store.values if not any(part in key for part in kept)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_all_ranks_get_the_same_answer_in_the_same_look(seed: int) -> None:
    world_size, count, ahead = 5, 30, 3
    plan = random.Random(seed)
    blocking = [[plan.random() < 0.2 for _ in range(1000)] for _ in range(count)]
    fails = {(rank, number) for rank in range(world_size) for number in range(count) if plan.random() < 0.05}

    def work(session: PeerSession, rank: int) -> list[Any]:
        chance = random.Random(seed * 100 + rank)
        calls: list[ScheduledCall] = []
        answers: list[Any] = []
        for number in range(count + ahead):
            if number < count:
                calls += added(session, call(number, 20, done=False))
            oldest = number - ahead
            over: Any = False
            while oldest >= 0 and not over:
                look = calls[oldest].looks
                waits = blocking[oldest][look]
                for position, each in enumerate(calls):
                    if not each.result.done() and (waits or chance.random() < 0.3):
                        if (rank, position) in fails:
                            each.result.set_exception(CheckpointSaveError(f"no {position}", 28))
                        else:
                            each.result.set_result(None)
                time.sleep(chance.random() * 0.002)
                over = answer(session, calls[oldest], waits)
                answers.append((oldest, look, over))
        return answers

    store = Store()
    results = on_ranks(world_size, work, store)
    for result in results:
        assert isinstance(result, list), result
        assert next((pair for pair in zip(results[0], result, strict=False) if pair[0] != pair[1]), None) is None
    ends = {number: over for number, _, over in results[0] if over}
    for number, over in ends.items():
        failed = {rank for rank in range(world_size) if (rank, number) in fails}
        assert (over is True) == (not failed) and (over is True or set(over) <= failed)
    assert len(ends) == count and {type(over) for over in ends.values()} == {bool, dict}


def test_the_keys_of_calls_are_removed() -> None:
    def work(session: PeerSession, rank: int) -> list[int]:
        counts = []
        for number in range(20):
            (each,) = added(session, call(number))
            while not answer(session, each, blocking=number % 2 == 0):
                pass
            session.run_step(f"step/{number}", lambda: None, "Step")
            counts.append(len(keys_of(store)))
        return counts

    store = Store()
    assert all(max(counts) <= 20 for counts in on_ranks(3, work, store))


def test_many_ranks_take_a_step_together() -> None:
    def step(rank: int) -> None:
        if rank == 77:
            raise ValueError("broken")

    def work(session: PeerSession, rank: int) -> Any:
        total = session.total(rank)
        try:
            session.run_step("step", lambda: step(rank), "The step", 60)
        except RanksError as error:
            return total, error.failures
        return None

    results = on_ranks(100, work, Store())
    assert all(result == (sum(range(100)), {77: "ValueError: broken"}) for result in results), results[:3]


def test_a_rank_that_lives_and_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRACE_SECONDS", 5.0)
    over = threading.Barrier(3)

    def work(session: PeerSession, rank: int) -> Any:
        (each,) = added(session, call(timeout=0.3))
        failures = answer(session, each) if rank != 1 else None
        over.wait(20)
        return failures

    here, silent, there = on_ranks(3, work, Store())
    assert here == there and set(here) == {1} and "did not finish" in here[1] and silent is None


def test_an_error_without_a_text_reaches_all_ranks() -> None:
    class Silent(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def step(rank: int) -> None:
        if rank:
            raise Silent

    here, there = on_ranks(2, lambda session, rank: session.run_step("step", lambda: step(rank), "The step"), Store())
    assert here.failures == there.failures and "Silent" in here.failures[1]
    assert isinstance(there.__cause__, Silent) and here.__cause__ is None


def test_a_leading_rank_that_lives_and_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.1)
    over = threading.Barrier(2)

    def work(session: PeerSession, rank: int) -> None:
        (each,) = added(session, call(timeout=0.1))
        try:
            if rank:
                session.look(each, blocking=False)
        finally:
            over.wait(20)

    _, error = on_ranks(2, work, Store())
    assert isinstance(error, CheckpointTimeoutError) and "rank 0 to decide" in str(error)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_whose_heart_stops_is_dead(dead: int, blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HEARTBEAT_SECONDS", 0.4)
    stopped, over = threading.Event(), threading.Barrier(2)
    store = Store()

    def work(session: PeerSession, rank: int) -> Any:
        (each,) = added(session, call())
        try:
            if rank == dead:  # as `kill -9` does, once there has been a heartbeat
                eventually(lambda: f"test/beat/{rank}" in store.values)
                store.refused = f"test/beat/{rank}"
                stopped.set()
                return None
            assert stopped.wait(20)
            deadline = time.monotonic() + 20
            while (failures := answer(session, each, blocking)) is False:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return failures
        finally:
            over.wait(20)

    failures = on_ranks(2, work, store)[1 - dead]
    assert set(failures) == {dead} and "considered dead" in failures[dead]


def test_a_dead_store_is_an_error() -> None:
    store = Store()
    session = PeerSession(Connection(store, 0, 2, "test/"))
    first, second = added(session, call(0), call(1))
    store.gone = True
    with pytest.raises(RanksError, match="cannot reach the store"):
        session.look(first, blocking=True)
    session.give_up(second, CheckpointSaveError("given up"))
    with pytest.raises(RanksError, match="cannot reach the store"):
        session.run_step("step", lambda: None, "The step")
    session.rest()


@pytest.mark.parametrize("gives_up", [0, 1])
def test_what_one_rank_gives_up_fails_on_the_others(gives_up: int) -> None:
    def work(session: PeerSession, rank: int) -> list[Any]:
        first, *calls = added(session, *(call(number, done=number in (0, 3)) for number in range(4)))
        assert answer(session, first)
        if rank == gives_up:
            for each in calls[:2]:
                session.give_up(each, CheckpointSaveError("given up"))
            return [answer(session, calls[2])]
        answers = []
        for each in calls[:2]:
            while (over := answer(session, each, blocking=False)) is False:
                time.sleep(0.01)
            answers.append(over)
        return [*answers, answer(session, calls[2])]

    failures = {gives_up: "given up"}
    results = on_ranks(2, work, Store())
    assert results[gives_up] == [True] and results[1 - gives_up] == [failures, failures, True]


def test_a_rank_that_is_behind_when_rank_0_gives_up_gets_the_answers_that_rank_0_got() -> None:
    gave_up = threading.Event()

    def work(session: PeerSession, rank: int) -> list[Any]:
        (each,) = added(session, call(done=False))
        if rank == 0:
            answers = [answer(session, each, blocking=False)]
            session.give_up(each, CheckpointSaveError("given up"))
            gave_up.set()
            return answers
        assert gave_up.wait(20)
        return [answer(session, each, blocking=False) for _ in range(2)]

    assert on_ranks(2, work, Store()) == [[False], [False, {0: "given up"}]]


def test_heartbeats_are_sent_until_the_session_rests() -> None:
    store = Store()
    session = PeerSession(Connection(store, 0, 1, "test/"))

    def hearts() -> int:
        return sum(thread.name == "ckpt-heartbeat" for thread in threading.enumerate())

    before = hearts()
    (each,) = added(session, call())
    assert session.look(each, blocking=True)
    assert hearts() == before + 1
    session.rest()
    session.rest()
    assert hearts() == before and store.values["test/beat/0"] == RESTING
    added(session, call(1))
    eventually(lambda: store.values["test/beat/0"] != RESTING)
    assert hearts() == before + 1
    del session
    eventually(lambda: hearts() == before)


def test_a_rank_that_rests_is_late_and_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HEARTBEAT_SECONDS", 0.2)
    resting, waiting = threading.Event(), threading.Barrier(2)

    def work(session: PeerSession, rank: int) -> Any:
        (first,) = added(session, call())
        assert session.look(first, blocking=True)
        if rank == 1:
            session.rest()
            resting.set()
            waiting.wait(20)
            time.sleep(0.6)
        else:
            assert resting.wait(20)
            waiting.wait(20)
        (second,) = added(session, call(1))
        return answer(session, second)

    assert on_ranks(2, work, Store()) == [True, True]


def test_a_rank_that_looks_alone_does_not_shift_the_others() -> None:
    store = Store()

    def work(session: PeerSession, rank: int) -> Any:
        shared = PeerSession(Connection(store, rank, 2, "test/"))
        if rank == 0:
            (own,) = added(session, call())
            session.give_up(own, CheckpointSaveError("given up"))
        (each,) = added(shared, call(timeout=5))
        over = answer(shared, each)
        shared.rest()
        return over

    assert on_ranks(2, work, store) == [True, True]
