"""A rank whose heartbeats do not arrive, on simulated time: it learns that the others consider it dead."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from simulated_ranks import after

from ckpt_component import RanksError
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.testing.simulated_store import SimulatedConnection, SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

TIMEOUT = 10.0


class Deaf(SimulatedStore):
    """Takes no heartbeats between two times, and no other connection then: nothing listens at `port`."""

    def __init__(self, holder: SimulatedProcess, port: int, begin: float, end: float) -> None:
        super().__init__(holder)
        self.port = port
        self.begin, self.end, self.tries = begin, end, list[float]()

    def connect(self, process: SimulatedProcess) -> SimulatedConnection:
        return _DeafConnection(self, process)


class _DeafConnection(SimulatedConnection):
    def __init__(self, store: Deaf, process: SimulatedProcess) -> None:
        super().__init__(store, process)
        self.host, self.port = "127.0.0.1", store.port
        self._deaf, self._time = store, process.simulation

    def clone(self) -> SimulatedConnection:
        return self._deaf.connect(self._process)

    def set(self, key: str, value: bytes) -> None:
        if "beat/" in key and self._deaf.begin <= self._time.now < self._deaf.end:
            self._deaf.tries.append(self._time.now)
            raise RuntimeError("no heartbeats (simulated)")
        super().set(key, value)


def run(
    begin: float, end: float, ask: Callable[[StoreCoordinator], None], lasts: float = 1000.0, *, is_held: bool = False
) -> Deaf:
    """Let a rank ask something while the store takes no heartbeats between two times; `is_held`: its port listens."""
    simulation = Simulation(1)
    process = simulation.process("rank 0")
    refuses = socket.socket()
    refuses.bind(("127.0.0.1", 0))
    if is_held:
        refuses.listen()
    store = Deaf(process, refuses.getsockname()[1], begin, end)

    def train() -> None:
        connection = StoreConnection(store.connect(process), 60.0, opens=False, outside=process.outside)
        ranks = StoreCoordinator(RankStore(connection, 0, 1, "run/"), TIMEOUT, 30.0)
        ask(ranks)
        ranks.close()

    process.start(train)
    with refuses:
        assert simulation.run(lasts)
    return store


def meet(ranks: StoreCoordinator) -> Any:
    return ranks.meet("save", 1, sum, after(ranks, 5.0))


def test_a_rank_that_is_considered_dead_is_told_why_and_may_go_on_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component.coordination")

    def ask(ranks: StoreCoordinator) -> None:
        ranks.outside.sleep(10.5)
        assert meet(ranks) == 1  # no heartbeat since 2 s; 10 s are allowed
        ranks.outside.sleep(10.0)
        with pytest.raises(RanksError) as caught:
            meet(ranks)
        text = str(caught.value)
        because = (
            " s, so the other ranks consider it dead (timeouts.heartbeat): RanksError: Rank 0 cannot reach the store"
        )
        assert text.startswith("Rank 0 has sent no heartbeat for ") and because in text
        assert text.endswith("no heartbeats (simulated)")
        assert 16 <= int(text.split()[7]) <= 19, text
        ranks.outside.sleep(40.0)
        assert meet(ranks) == 1

    run(3.0, 30.0, ask)
    first, again = (record.getMessage() for record in caplog.records)
    assert first.startswith("rank 0 cannot send its heartbeat, retrying: Rank 0 cannot reach the store")
    assert again == "rank 0 sends heartbeats again"


def test_a_rank_that_is_considered_dead_tries_less_often() -> None:
    store = run(3.0, 500.0, lambda ranks: ranks.outside.sleep(105.0))
    pauses = [later - earlier for earlier, later in zip(store.tries, store.tries[1:], strict=False)]
    # Every two seconds for as long as the others wait, then every half minute.
    assert [round(pause) for pause in pauses] == [2, 2, 2, 2, 30, 30, 30], store.tries


def test_the_last_heartbeat_says_that_the_manager_is_closed() -> None:
    store = run(500.0, 600.0, lambda ranks: ranks.outside.sleep(3.0), is_held=True)
    assert store.values["run/beat/0"].decode().endswith(" true]"), store.values["run/beat/0"]


def test_a_rank_whose_heartbeats_fail_sends_no_last_one() -> None:
    store = run(3.0, 500.0, lambda ranks: ranks.outside.sleep(5.0))
    assert store.tries == pytest.approx([4.0], abs=0.2)


def test_no_last_heartbeat_is_sent_to_a_store_whose_process_has_ended() -> None:
    assert run(1.0, 1000.0, lambda ranks: ranks.outside.sleep(1.5)).tries == []
