"""A store that does not answer: every call ends in bounded time, and once it answers again calls work."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed

from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.outside import Latch, Outside
from ckpt_component.errors import CheckpointSaveError, CheckpointTimeoutError, RanksError


class Held:
    """A store in this process whose calls wait while it is stopped, as those of torch do."""

    host, port = "node17", 29400

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.counts: dict[str, int] = {}
        self.values: dict[str, bytes] = {}
        self.clones = 0

    def clone(self) -> Held:
        self.answers.wait()
        self.clones += 1
        return self

    def add(self, key: str, amount: int) -> int:
        self.answers.wait()
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def set(self, key: str, value: bytes) -> None:
        self.answers.wait()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.answers.wait()
        return [self.values[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        self.answers.wait()
        return self.values.pop(key, None) is not None


@pytest.fixture
def held() -> Iterator[Held]:
    store = Held()
    yield store
    store.answers.set()


def connected(held: Held, timeout: float = 0.3, rank: int = 1) -> RankStore:
    return RankStore(StoreConnection(held, timeout, opens=True), rank, 2, "test/")


CALLS: dict[str, Callable[[RankStore], Any]] = {
    "add": lambda store: store.add("count", 1),
    "set": lambda store: store.set("key", b"value"),
    "peek": lambda store: store.peek("key"),
    "has": lambda store: store.has("key"),
    "read": lambda store: store.read(["key"]),
    "delete": lambda store: store.delete(["key"]),
    "own": lambda store: store.own(),
    "clone": lambda store: store.clone().add("count", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_and_names_the_holder(name: str, held: Held) -> None:
    store = connected(held)
    held.answers.clear()
    for _ in range(2):
        text = r"rank 0 at node17:29400, has not answered .*timeouts.heartbeat=0.3"
        with pytest.raises(RanksError, match=text) as caught:
            CALLS[name](store)
        assert caught.value.failures == {0: "does not answer"} and caught.value.causes == {0: "RanksError"}
    held.answers.set()
    assert store.add("later", 2) == 2 and not store.is_blocked


def test_the_agent_is_named(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    held.answers.clear()
    with pytest.raises(RanksError, match="the torchrun agent at node17:29400, has not answered") as caught:
        connected(held).add("count", 1)
    assert not caught.value.failures


@pytest.mark.slow
def test_a_deadline_comes_before_the_timeout(held: Held) -> None:
    store = connected(held, timeout=60)
    held.answers.clear()
    started = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match="rank 0 at node17:29400, has not answered"):
        store.until(started).add("count", 1)
    assert time.monotonic() - started < 30


def test_after_a_call_without_an_answer_others_do_not_wait_that_long(held: Held) -> None:
    waits: list[float] = []

    class Counted(Latch):
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return super().wait(0)

    class Hasty(Outside):
        def latch(self) -> Latch:
            return Counted()

    held.answers.clear()
    connection = StoreConnection(held, 60, opens=False, outside=Hasty())
    for seconds in (60, 1, 1):
        waits.clear()
        with pytest.raises(CheckpointTimeoutError, match="not answered for 0 s"):  # no time passes here
            connection.call(lambda store: store.add("count", 1))
        assert sum(waits) == seconds


def test_a_wait_lasts_until_its_deadline(held: Held) -> None:
    class Quick(Outside):
        """Its time passes at once."""

        def __init__(self) -> None:
            self.moment = 0.0
            self.now, self.sleep = lambda: self.moment, self.pass_by

        def pass_by(self, seconds: float) -> None:
            self.moment += seconds

    outside = Quick()
    store = RankStore(StoreConnection(held, 60, opens=False, outside=outside), 1, 2, "test/")
    store.wait_until(lambda: outside.moment > 9.5, 10.0, lambda: "rain")
    with pytest.raises(CheckpointTimeoutError, match=r"Timed out waiting for rain\."):
        store.wait_until(lambda: False, 20.0, lambda: "rain")
    assert outside.moment == pytest.approx(20.0)


def test_a_call_that_was_not_begun_is_not_made_later(held: Held) -> None:
    store = connected(held)
    held.answers.clear()
    for _ in range(2):
        with pytest.raises(RanksError):
            store.add("count", 1)
    held.answers.set()
    assert store.add("count", 0) == 1  # the first was on its way


def test_a_question_is_withdrawn_once_the_store_answers(held: Held) -> None:
    stores = [connected(held, timeout, rank) for rank, timeout in ((0, 60), (1, 0.3))]
    ranks = [StoreCoordinator(store, timeout) for store, timeout in zip(stores, (60, 0.3), strict=True)]
    deadline = time.monotonic() + 60
    held.answers.clear()
    with pytest.raises(RanksError, match="has not answered"):
        ranks[1].meet("save", "b", len, deadline, "path")
    held.answers.set()
    # The connection's thread withdraws before it makes another call.
    assert stores[1].add("another", 1) == 1
    with pytest.raises(RanksError, match="has not answered"):
        ranks[0].meet("save", "a", len, deadline, "path")
    assert [rank.meetings["save"] for rank in ranks] == [1, 1]
    for rank in ranks:
        rank.close()


def test_a_vote_of_which_the_store_took_a_part_counts_as_a_failure(held: Held) -> None:
    """Else the leader, which misses no rank and too few votes, would wait until its deadline."""
    leader, voter = (StoreCoordinator(connected(held, rank=rank)) for rank in (0, 1))
    leader.cast("save", "written")
    held.answers.clear()
    with pytest.raises(RanksError, match="has not answered"):
        voter.cast("save", "written")
    held.answers.set()
    try:
        with pytest.raises(RanksError, match="has not answered"):
            leader.count("save", time.monotonic() + 20)
    finally:
        for ranks in (leader, voter):
            ranks.close()


def test_a_failure_ends_the_vote_before_the_others_have_voted(held: Held) -> None:
    leader, voter = (StoreCoordinator(connected(held, rank=rank)) for rank in (0, 1))
    voter.cast("save", None, CheckpointSaveError("the disk is full"))
    try:
        with pytest.raises(RanksError, match="the disk is full") as caught:
            leader.count("save", time.monotonic() + 20)
        assert [*caught.value.failures] == [1]
    finally:
        for ranks in (leader, voter):
            ranks.close()


def test_a_clone_is_a_connection_of_its_own_from_its_first_call_on(held: Held) -> None:
    """So that a thread that waits for an answer keeps no other one waiting."""
    store = connected(held)
    store.set("key", b"value")
    clone = store.clone()
    assert held.clones == 1
    assert clone.peek("key") == b"value" and held.clones == 2


def test_ranks_have_a_connection_of_their_own_to_the_store_of_the_process_group(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's calls, which may wait for minutes, must not keep ours waiting."""
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: held)
    RankStore.of_group(0, 2, "test").set("key", b"value")
    assert held.clones == 1


def test_an_answer_that_was_not_begun_is_given_once_the_store_answers(held: Held) -> None:
    """What rank 0 did is done: the others learn of it late, rather than never."""
    leader, other = (StoreCoordinator(connected(held, timeout, rank)) for rank, timeout in ((0, 0.3), (1, 60)))
    held.answers.clear()
    for number in range(2):  # the first waits for the store, the second for the first
        assert leader.run_on_leader(f"act/{number}", lambda: "done", time.monotonic() + 20) == "done"
    held.answers.set()
    for number in range(2):
        assert other.run_on_leader(f"act/{number}", lambda: None, time.monotonic() + 20) == "done"
    for ranks in (leader, other):
        ranks.close()


def test_the_thread_of_a_connection_ends_with_it(held: Held) -> None:
    before = {*threading.enumerate()}  # those of other tests may end at any time
    store = connected(held)
    assert store.until(math.inf).add("count", 1) == 1
    (thread,) = (new for new in {*threading.enumerate()} - before if new.name == "ckpt-store")
    del store
    thread.join(30)
    assert not thread.is_alive()


def break_connections(port: int) -> int:
    """Break the connections of this process to a port, as a router that forgets them does; returns how many."""
    broken = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def test_a_connection_that_broke_is_opened_again() -> None:
    master = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = RankStore(StoreConnection(master, 5.0, opens=True), 0, 2, "test/")
    store.set("key", b"value")
    assert break_connections(master.port)
    assert store.peek("key") == b"value"  # a read is repeated
    assert store.add("count", 1) == 1
    assert break_connections(master.port)
    with pytest.raises(RanksError, match=f"its connection to rank 0 at 127.0.0.1:{master.port} broke"):
        store.add("count", 1)  # unknown whether it was done
    assert store.add("count", 1) in (2, 3)


def test_a_store_that_has_ended_is_noticed_at_once() -> None:
    master = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = master.port
    client = torch.distributed.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    store = RankStore(StoreConnection(client, 60.0, opens=True), 1, 2, "test/")
    store.set("key", b"value")
    del master
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(RanksError, match="cannot reach the store"):
            store.peek("key")
    assert time.monotonic() - began < 10
