"""What stays in memory while peers pull snapshots, and which one they pull next."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from rank_threads import rank_threads
from waiting import eventually

from ckpt_component import CheckpointListener, SaveReport, WorkerDiedError
from ckpt_component.callers.write_callers import MemoryCaller
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.coordination import Coordinator, Hosts
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.events import EventRecorder
from ckpt_component.hosts.snapshots import PeerMap, SnapshotsAtPeers
from ckpt_component.managing.run_context import RunContext

TIMEOUTS = ResolvedTimeouts(stage=20, write=20, close=10)


class SnapshotStore(MemoryCaller):
    """Pulls at once, or when it may."""

    def __init__(self) -> None:
        super().__init__(lambda timeout: cast(Any, None))
        self.pulled: list[tuple[str, Sequence[tuple[Sequence[Any], float | None]]]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.deaf = False

    def prepare(self, timeout: float) -> None:
        """It runs."""

    def listen(self, secret: str, address: str, timeout: float) -> int:
        assert secret == "secret"
        if self.deaf:
            raise WorkerDiedError("no port.")
        return 4000

    def pull(self, path: str, homes: Sequence[tuple[Sequence[Any], float | None]], deadline: float) -> dict[str, Any]:
        self.pulled.append((path, homes))
        assert self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure
        return {"bytes": 9, "sent": 8, "seconds": 0.5}

    def progress(self) -> int:
        return 0


class Heard(CheckpointListener):
    def __init__(self) -> None:
        self.heard: list[SaveReport] = []

    def on_at_peers(self, report: SaveReport) -> None:
        self.heard.append(report)


class Rank:
    """One of two ranks, each on a host."""

    def __init__(self, ranks: Coordinator) -> None:
        peers = PeerMap([[1], [0]], f"10.0.0.{ranks.rank}", "secret", 1e6)
        self.client, self.listener, self.first, self.notice = SnapshotStore(), Heard(), list[str](), threading.Event()
        events = EventRecorder(listeners=[self.listener], rank=ranks.rank)
        self.first_is_told = threading.Event()
        self.first_is_told.set()
        run = RunContext(file_storage(), "/runs/one", MEGATRON, ranks, TIMEOUTS, events=events, hosts=Hosts(("a", "b")))
        self.copies = SnapshotsAtPeers(peers, self.client, run, self.tell_first)
        self.copies.begin(self.notice.set)
        self.rank = ranks.rank

    def tell_first(self) -> None:
        self.first.append("at peers")
        assert self.first_is_told.wait(20)

    def whole(self, step: int) -> list[str]:
        self.copies.prepare(self.client, 20.0)
        self.copies.whole(SaveReport(f"step{step}", step=step))
        return self.paths()

    def arrived(self) -> list[str]:
        assert self.notice.wait(20)
        self.notice.clear()
        return self.paths()

    def paths(self) -> list[str]:
        return [*dict.fromkeys(self.copies.paths())]


@pytest.fixture
def both() -> Any:
    with rank_threads(2) as on_all:
        ranks = on_all(Rank)

        def call(function: Callable[[Rank], Any]) -> list[Any]:
            return on_all(lambda coordinator: function(ranks[coordinator.rank]))

        yield call
        call(lambda rank: rank.client.go_on.set())
        call(lambda rank: rank.copies.close())


def test_the_newest_snapshot_is_pulled_when_nobody_pulls_and_those_in_between_are_skipped(both: Any) -> None:
    assert both(lambda rank: rank.whole(1)) == [["step1"]] * 2
    assert both(lambda rank: rank.arrived()) == [["step1"]] * 2
    both(lambda rank: rank.client.go_on.clear())
    assert both(lambda rank: rank.whole(2)) == [["step1", "step2"]] * 2
    assert both(lambda rank: rank.whole(3)) == [["step1", "step2", "step3"]] * 2
    assert both(lambda rank: rank.whole(4)) == [["step1", "step2", "step4"]] * 2
    both(lambda rank: rank.client.go_on.set())
    eventually(lambda: both(lambda rank: rank.paths()) == [["step4"]] * 2)
    pulled = both(lambda rank: rank.client.pulled)
    assert [path for path, _ in pulled[0]] == ["step1", "step2", "step4"]
    homes = [[(tuple(home[1:]), rate) for home, rate in homes] for _, homes in pulled[0]]
    assert homes == [[(("10.0.0.1", 4000, 1), 1e6)]] * 3, "where the other one listens"
    assert both(lambda rank: rank.first) == [["at peers"]] * 2


def test_a_rank_with_a_newer_snapshot_pulls_the_older_one_without_delay(both: Any) -> None:
    """It is whole there while the ranks agree on the one before, which another rank has not gone beyond."""
    both(lambda rank: rank.client.go_on.clear())
    both(lambda rank: rank.first_is_told.clear() if rank.rank == 0 else None)
    both(lambda rank: rank.whole(1))
    both(lambda rank: rank.whole(2))
    both(lambda rank: rank.client.go_on.set())

    def go_on(rank: Rank) -> None:
        if rank.rank == 1:
            assert rank.notice.wait(20)
            time.sleep(0.2)  # it asks which one is next
            rank.whole(3)
        else:
            time.sleep(0.6)
            rank.first_is_told.set()

    both(go_on)
    both(lambda rank: rank.whole(3) if rank.rank == 0 else None)
    eventually(lambda: both(lambda rank: rank.paths()) == [["step3"]] * 2, seconds=10)
    # Listeners are called on a thread of their own.
    eventually(lambda: both(lambda rank: [report.step for report in rank.listener.heard]) == [[1, 2, 3]] * 2)


def test_listeners_and_the_log_are_told_what_is_at_its_peers(both: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    both(lambda rank: rank.whole(1))
    eventually(lambda: all(both(lambda rank: bool(rank.listener.heard))))
    report = both(lambda rank: rank.listener.heard[0])[1]
    assert (report.step, report.sent) == (1, 8) and report.at_peers_s > 0
    assert "step 1 is at its peers: 8 bytes received by rank 0 in 0.50 s" in caplog.text


def test_what_one_rank_cannot_pull_is_at_no_peer_and_what_was_there_stays(
    both: Any, caplog: pytest.LogCaptureFixture
) -> None:
    both(lambda rank: rank.whole(1))
    both(lambda rank: rank.arrived())

    def fail(rank: Rank) -> None:
        if rank.rank == 1:
            rank.client.failure = WorkerDiedError("the peer has died.")

    both(fail)
    both(lambda rank: rank.whole(2))
    eventually(lambda: caplog.text.count("step2 did not get to its peers") == 2)
    assert both(lambda rank: rank.paths()) == [["step1", "step2"]] * 2
    both(lambda rank: setattr(rank.client, "failure", None))
    both(lambda rank: rank.whole(3))
    assert both(lambda rank: rank.arrived()) == [["step3"]] * 2
    assert "the peer has died" in caplog.text


def test_nothing_is_pulled_while_a_rank_cannot_listen(both: Any, caplog: pytest.LogCaptureFixture) -> None:
    both(lambda rank: setattr(rank.client, "deaf", rank.rank == 0))
    assert both(lambda rank: rank.whole(1)) == [["step1"]] * 2
    assert both(lambda rank: rank.client.pulled) == [[]] * 2
    assert "rank 0's snapshot server cannot be reached from other hosts: no port." in caplog.text


def test_a_home_sends_all_its_holders_together_no_more_than_its_limit() -> None:
    peers = PeerMap([[2], [2, 3], [1, 3], [0]], "", "", 600.0)
    assert peers.pulls("abcd") == [
        [("d", 600.0)],
        [("c", 300.0)],
        [("a", 600.0), ("b", 300.0)],
        [("b", 300.0), ("c", 300.0)],
    ]
    assert PeerMap([[1], [0]], "", "").pulls("ab") == [[("b", None)], [("a", None)]]
