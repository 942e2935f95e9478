"""A snapshot whose trainers died before it was decided: whom the servers wait for, and what ends each wait."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt_component.core.commit.commit import abandon, begin, new_attempt, publish
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import integrity_name
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.outside import Outside
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.orphan_commit import UndecidedSave
from ckpt_component.core.writing.request import WriteOptions, WriteRequest, WriteTable
from ckpt_component.errors import CheckpointSaveError, CheckpointTimeoutError
from ckpt_component.hosts.keep import SnapshotProcess
from ckpt_component.hosts.server import SnapshotServer
from ckpt_component.hosts.stores import MemoryStore

ROOT = "host://runs/one@1f2e3d4c-0a0b0c0d"
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=60.0, close=20.0, heartbeat=5.0, stall=60.0, visible=0.0)


class QuickClock(Outside):
    """Its waits take no time, and it calls what happens meanwhile."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.pauses = 0
        self.now = lambda: float(self.pauses)
        self.sleep = lambda seconds: self._wait(meanwhile)

    def _wait(self, meanwhile: Callable[[], object]) -> None:
        self.pauses += 1
        if self.pauses == 3:
            meanwhile()


class OtherSnapshotStore:
    """The server of another rank, which says whether it still writes, or decides on, a snapshot."""

    def __init__(self, rank: int, *, writes: bool) -> None:
        self.rank, self.writes, self.files = rank, writes, MemoryStore()
        self.server = SnapshotServer(self.files, ROOT, rank, lambda: {"writing": self.writes})

    def vote(self, attempt: Attempt) -> None:
        self.files.put(os.path.join(attempt.staging, integrity_name(self.rank)), b'{"files": []}')

    @contextmanager
    def here(self) -> Iterator[OtherSnapshotStore]:
        self.server.start()
        try:
            yield self
        finally:
            self.server.close()


class Lock:
    """Of an attempt; `is_held` until it is released."""

    is_held = True

    def close(self) -> None:
        self.is_held = False


@pytest.mark.parametrize(
    ("end", "decides_later", "waits"),
    [
        ("committed", False, 0),
        ("committed", True, 3),
        ("abandoned", False, 0),
        ("abandoned", True, 3),
        ("unknown", False, 0),  # rank 0's server has no part in it
        ("unknown", True, 6),  # until the deadline of the save
    ],
)
def test_the_older_snapshot_is_dropped_if_the_last_save_of_a_dead_trainer_is_whole(
    end: str, decides_later: bool, waits: int
) -> None:
    client, lock = SnapshotProcess("/runs/one", ROOT, 1, 2, 10.0), Lock()
    for step in (0, 1):
        client.files.put(f"{ROOT}/iter_{step}/file", b"older")
    client.retire([f"{ROOT}/iter_0", f"{ROOT}/iter_1"])
    attempt = new_attempt(client.storage, f"{ROOT}/iter_2", new_token())
    begin(attempt)
    commit = partial(publish, attempt, [{"rank": 0, "files": []}], {}, {})
    ends: dict[str, Callable[[], object]] = {
        "committed": commit,
        "abandoned": partial(abandon, attempt),
        "unknown": lambda: None,
    }

    def decide() -> None:
        assert not lock.is_held, "who follows a decision does not count as one who votes"
        ends[end]()

    with OtherSnapshotStore(0, writes=True).here() as leader:
        if not decides_later:
            ends[end]()
            leader.writes = False
        client.storage.outside = outside = QuickClock(decide)
        request = SimpleNamespace(attempt=attempt)
        client.follow(cast(Any, SimpleNamespace(request=request, lock=lock, until=5.0)))
    assert outside.pauses == waits
    assert client.storage.exists(f"{ROOT}/iter_2/manifest.json") == (end == "committed")
    assert client.storage.exists(f"{ROOT}/iter_1/file") != (end == "committed")
    assert client.storage.exists(f"{ROOT}/iter_0/file"), "it stays for its peers"


def test_a_server_does_not_wait_where_the_one_that_decides_is_gone() -> None:
    """Or is on another host."""
    client = SnapshotProcess("/runs/one", ROOT, 1, 2, 10.0)
    attempt = new_attempt(client.storage, f"{ROOT}/iter_2", new_token())
    begin(attempt)
    request = SimpleNamespace(attempt=attempt)
    client.follow(cast(Any, SimpleNamespace(request=request, lock=Lock(), until=1e12)))
    assert client.files.listed(f"{ROOT}/iter_2"), "a restore finds out whether all ranks have it"


class Decision:
    """Of rank 0's server on an attempt of three ranks, whose trainers are dead; rank 2 has voted, and follows.

    `meanwhile` is called in the third pause of its wait.
    """

    def __init__(
        self, middle: OtherSnapshotStore | None, meanwhile: Callable[[Attempt], object] = lambda _: None
    ) -> None:
        client, last = SnapshotProcess("/runs/one", ROOT, 0, 3, 10.0), OtherSnapshotStore(2, writes=False)
        attempt = new_attempt(client.storage, f"{ROOT}/iter_0000002", new_token())
        client.storage.outside = self.outside = QuickClock(lambda: meanwhile(attempt))
        with last.here():
            begin(attempt)
            last.vote(attempt)
            lock = AttemptLock(client.storage, attempt)
            client.files.put(os.path.join(attempt.staging, integrity_name(0)), b'{"files": []}')
            table, source = WriteTable(1, [], [], 0, b""), cast(Any, None)
            request = WriteRequest(client.storage, attempt, 0, 3, table, (), source, WriteOptions(), {}, TIMEOUTS)
            own = {"rank": 0, "files": [{"name": integrity_name(0), "size": 13}]}
            sidecars = {".metadata": zlib.compress(b"m")}
            save = UndecidedSave(request, cast(Any, own), sidecars, lock, 1000.0)
            if middle is None:
                save.finish(client.still_writing)
            else:
                with middle.here():
                    save.finish(client.still_writing)
            lock.close()
            manifest = read_manifest(client.storage, attempt.target)
            self.is_committed = manifest is not None and manifest["world_size"] == 3


def test_the_server_that_decides_does_not_wait_for_a_rank_that_has_no_job() -> None:
    """Its trainer died before it asked for anything; rank 2's server, which waits for the decision, does not count."""
    decision = Decision(OtherSnapshotStore(1, writes=False))
    assert decision.outside.pauses == 0 and not decision.is_committed


def test_the_server_that_decides_does_not_wait_for_a_server_that_is_gone() -> None:
    decision = Decision(None)
    assert decision.outside.pauses == 0 and not decision.is_committed


def test_the_server_that_decides_waits_for_a_rank_that_still_writes() -> None:
    middle = OtherSnapshotStore(1, writes=True)

    def ends(attempt: Attempt) -> None:
        middle.vote(attempt)
        middle.writes = False

    decision = Decision(middle, ends)
    assert decision.outside.pauses == 3 and decision.is_committed


def test_a_rank_that_writes_nothing_is_given_up_after_the_heartbeat_timeout() -> None:
    decision = Decision(OtherSnapshotStore(1, writes=True))
    assert TIMEOUTS.heartbeat <= decision.outside.pauses <= TIMEOUTS.heartbeat + 2 and not decision.is_committed


def test_a_commit_does_not_wait_for_files_of_a_server_that_has_ended() -> None:
    """It had voted: what is not in memory now never comes, as it may on a file system that shows names late."""
    client = SnapshotProcess("/runs/one", ROOT, 0, 2, 10.0)
    attempt = new_attempt(client.storage, f"{ROOT}/iter_0000002", new_token())
    begin(attempt)
    client.storage.outside = outside = QuickClock(lambda: None)
    votes = [{"rank": 0, "files": []}, {"rank": 1, "files": [{"name": "__1_0.distcp", "size": 5}]}]
    with pytest.raises(CheckpointSaveError, match=r"__1_0.distcp has None bytes on disk"):
        publish(attempt, votes, {}, {}, 60.0)
    assert outside.pauses == 0


def test_a_rank_does_not_wait_for_the_attempt_of_a_leading_server_that_has_ended() -> None:
    client = SnapshotProcess("/runs/one", ROOT, 1, 2, 10.0)
    attempt = new_attempt(client.storage, f"{ROOT}/iter_0000002", new_token())
    client.storage.outside = outside = QuickClock(lambda: None)
    with pytest.raises(CheckpointTimeoutError, match="iter_0000002"):
        attempt.protocol.join(attempt, 60.0)
    assert outside.pauses == 0
