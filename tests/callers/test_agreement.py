"""`Agreement` without processes: every rank a thread, the store a dictionary."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from waiting import eventually

from ckpt_component.compat import agreement as room
from ckpt_component.compat import life
from ckpt_component.compat.agreement import Agreement
from ckpt_component.compat.verdict import Verdict
from ckpt_component.coordination import RankStore
from ckpt_component.errors import CheckpointSaveError, CheckpointTimeoutError, RanksError


class Store:
    """As a `torch.distributed` store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.gone = False

    def _locked(self, action: Callable[[], Any]) -> Any:
        with self.lock:
            if self.gone:
                raise RuntimeError("Connection reset by peer")
            return action()

    def set(self, key: str, value: bytes) -> None:
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


def on_ranks(world_size: int, work: Callable[[Agreement], Any], store: Store) -> list[Any]:
    """What `work` returned, or raised, by rank."""

    def run(rank: int) -> Any:
        try:
            return work(Agreement(Connection(store, rank, world_size, "test/")))
        except (CheckpointSaveError, CheckpointTimeoutError) as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def done(error: BaseException | None = None) -> Future[None]:
    outcome: Future[None] = Future()
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)
    return outcome


def keys_of(store: Store) -> set[str]:
    left = (key for key in store.values if "/beat/" not in key and "/made-by-" not in key)
    return {key for key in left if not key.endswith("announced")}


@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_tell_the_same_in_the_same_look(seed: int) -> None:
    world_size, calls, ahead = 5, 30, 3
    plan = random.Random(seed)
    blocking = [[plan.random() < 0.2 for _ in range(1000)] for _ in range(calls)]
    fails = {(rank, call) for rank in range(world_size) for call in range(calls) if plan.random() < 0.05}

    def work(agreement: Agreement) -> list[Any]:
        rank = agreement._store.rank
        chance = random.Random(seed * 100 + rank)
        outcomes: list[Future[None]] = []
        questions: list[Any] = []
        told: list[Any] = []
        for call in range(calls + ahead):
            if call < calls:
                outcomes.append(Future())
                questions.append(agreement.ask(f"Call {call}", outcomes[call], 20))
            oldest = call - ahead
            verdict = None
            while oldest >= 0 and verdict is None:
                look = questions[oldest].looks
                waits = blocking[oldest][look]
                for number, outcome in enumerate(outcomes):
                    if not outcome.done() and (waits or chance.random() < 0.3):
                        if (rank, number) in fails:
                            outcome.set_exception(CheckpointSaveError(f"no {number}", 28))
                        else:
                            outcome.set_result(None)
                time.sleep(chance.random() * 0.002)
                verdict = agreement.look(questions[oldest], waits)
                told.append((oldest, look, None if verdict is None else verdict.failures))
        return told

    store = Store()
    results = on_ranks(world_size, work, store)
    for result in results:
        assert isinstance(result, list), result
        assert next((pair for pair in zip(results[0], result, strict=False) if pair[0] != pair[1]), None) is None
    ends = {call: failures for call, _, failures in results[0] if failures is not None}
    for call, failures in ends.items():
        failed = {rank for rank in range(world_size) if (rank, call) in fails}
        assert bool(failures) == bool(failed) and set(failures) <= failed
    assert len(ends) == calls and any(ends.values()) and not all(ends.values())
    assert keys_of(store) == set()


def test_many_ranks_take_a_step_together() -> None:
    def work(agreement: Agreement) -> tuple[Verdict, int]:
        rank = agreement._store.rank
        return agreement.settle("step", ValueError("broken") if rank == 77 else None, 60), agreement.total(rank)

    store = Store()
    results = on_ranks(200, work, store)
    assert all(result == (Verdict({77: "ValueError: broken"}), sum(range(200))) for result in results), results[:3]
    assert keys_of(store) == set()


def test_a_rank_that_lives_and_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_GRACE_SECONDS", 5.0)
    over = threading.Barrier(3)

    def work(agreement: Agreement) -> Verdict | None:
        question = agreement.ask("Call 0", done(), 0.3)
        verdict = agreement.look(question, blocking=True) if agreement._store.rank != 1 else None
        over.wait(20)
        return verdict

    here, silent, there = on_ranks(3, work, Store())
    assert here == there == Verdict({1: "said nothing for 0.3 s"}) and silent is None


def test_an_error_without_a_text_is_told_all_the_same() -> None:
    class Silent(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def work(agreement: Agreement) -> Verdict:
        return agreement.settle("step", Silent() if agreement._store.rank else None, 20)

    here, there = on_ranks(2, work, Store())
    assert here == there and "Silent" in here.failures[1]


def test_a_leading_rank_that_lives_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_GRACE_SECONDS", 0.1)
    over = threading.Barrier(2)

    def work(agreement: Agreement) -> None:
        question = agreement.ask("Call 0", done(), 0.1)
        try:
            if agreement._store.rank:
                assert agreement.look(question, blocking=False) is None  # what is told of a first look
                agreement.look(question, blocking=False)
        finally:
            over.wait(20)

    _, error = on_ranks(2, work, Store())
    assert isinstance(error, CheckpointTimeoutError) and "rank 0 to look too" in str(error)


def stop_heart(agreement: Agreement) -> None:
    """As `kill -9` does, once there has been a beat."""
    rank = agreement._store.rank
    eventually(lambda: agreement._store.peek(f"beat/{rank}") is not None)
    agreement._life._hearts.pop().__exit__(None, None, None)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_whose_heart_stops_is_gone(gone: int, blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_HEARTBEAT_SECONDS", 0.4)
    stopped = threading.Event()

    def work(agreement: Agreement) -> Verdict | None:
        question = agreement.ask("Call 0", done(), 60)
        if agreement._store.rank == gone:
            stop_heart(agreement)
            stopped.set()
            return None
        assert stopped.wait(20)
        deadline = time.monotonic() + 20
        while (verdict := agreement.look(question, blocking)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return verdict

    told = on_ranks(2, work, Store())[1 - gone]
    if gone == 0:
        assert isinstance(told, RanksError) and set(told.failures) == {0}
    else:
        assert isinstance(told, Verdict) and "considered dead" in told.failures[1]


def test_a_store_that_is_gone_is_an_error() -> None:
    store = Store()
    agreement = Agreement(Connection(store, 0, 2, "test/"))
    first, second = (agreement.ask(f"Call {number}", done(), 60) for number in range(2))
    store.gone = True
    with pytest.raises(RanksError, match="cannot reach the store"):
        agreement.look(first, blocking=True)
    agreement.withdraw(second, CheckpointSaveError("given up"))
    with pytest.raises(RanksError, match="cannot reach the store"):
        agreement.settle("step", None)


def test_what_one_rank_gives_up_fails_on_the_others() -> None:
    def work(agreement: Agreement) -> list[Verdict | None]:
        questions = [agreement.ask(f"Call {number}", done() if number == 2 else Future(), 60) for number in range(3)]
        if agreement._store.rank == 0:
            for question in questions[:2]:
                agreement.withdraw(question, CheckpointSaveError("given up"))
            return [None, None, agreement.look(questions[2], blocking=True)]
        return [agreement.look(question, blocking=True) for question in questions]

    store = Store()
    here, there = on_ranks(2, work, store)
    assert here == [None, None, Verdict({})]
    assert there == [Verdict({0: "given up"}), Verdict({0: "given up"}), Verdict({})]
    assert keys_of(store) == set()


def test_who_is_behind_when_rank_0_gives_up_is_told_what_rank_0_was() -> None:
    gave_up = threading.Event()

    def work(agreement: Agreement) -> list[Verdict | None]:
        question = agreement.ask("Call 0", Future(), 60)
        if agreement._store.rank == 0:
            told = [agreement.look(question, blocking=False)]
            agreement.withdraw(question, CheckpointSaveError("given up"))
            gave_up.set()
            return told
        assert gave_up.wait(20)
        return [agreement.look(question, blocking=False) for _ in range(2)]

    here, there = on_ranks(2, work, Store())
    assert here == [None] and there == [None, Verdict({0: "given up"}, at=1)]


def test_hearts_beat_until_they_rest() -> None:
    store = Store()
    agreement = Agreement(Connection(store, 0, 1, "test/"))

    def hearts() -> int:
        return sum(thread.name == "ckpt-heartbeat" for thread in threading.enumerate())

    before = hearts()
    question = agreement.ask("Call 0", done(), 60)
    assert agreement.look(question, blocking=True) == Verdict({})
    assert hearts() == before + 1
    agreement.rest()
    agreement.rest()
    assert hearts() == before and store.values["test/beat/0"] == life._RESTING
    agreement.ask("Call 1", done(), 60)
    eventually(lambda: store.values["test/beat/0"] != life._RESTING)
    assert hearts() == before + 1
    del agreement
    assert hearts() == before and store.values["test/beat/0"] == life._RESTING


def test_a_rank_that_looks_alone_does_not_shift_the_others() -> None:
    def work(agreement: Agreement) -> Verdict | None:
        shared = Agreement(agreement._store)
        if agreement._store.rank == 0:
            own = agreement.ask("Call 0", done(), 60)
            agreement.look_alone()
            agreement.withdraw(own, None)
            agreement.withdraw(agreement.ask("Call 1", done(), 60), CheckpointSaveError("given up"))
        return shared.look(shared.ask("Call 0", done(), 5), blocking=True)

    assert on_ranks(2, work, Store()) == [Verdict({}), Verdict({})]


def test_what_is_given_up_before_the_first_look_fails_on_the_others() -> None:
    def work(agreement: Agreement) -> Verdict | None:
        question = agreement.ask("Call 0", Future(), 20)
        if agreement._store.rank == 1:
            agreement.withdraw(question, CheckpointSaveError("given up"))
            return None
        return agreement.look(question, blocking=True)

    assert on_ranks(2, work, Store()) == [Verdict({1: "given up"}), None]
