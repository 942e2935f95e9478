"""Snapshots with copies on other hosts: which hosts may be lost, and what the next run begins with then."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from snapshots import Life, clients, flip_images, live, lose

pytestmark = [pytest.mark.usefixtures("left_on_purpose"), pytest.mark.slow]

PEERS = ["checkpoint/recovery=peers"]
#: Sends nothing in the time of a test.
SLOW = [*PEERS, "checkpoint.recovery.max_bytes_per_second=100"]
FOUR = ["a", "a", "b", "b", "c", "c", "d", "d"]


def killed(folder: Path, hosts: list[str], **plan: Any) -> list[Life]:
    """A run whose step 1 is on the disk, and whose step 3 is at its peers when all ranks are killed."""
    return live(folder, hosts=hosts, **{"steps": 3, "durable": [1], "at_peers": 3, "end": "kill", **plan})


def goes_on_at_3(after: list[Life], before: list[Life]) -> None:
    assert {life.restored[0] for life in after} == {3}
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in before]


def begins_with_the_disk(lives: list[Life]) -> None:
    assert {life.restored for life in lives} == {(1, "storage")}


def test_the_next_run_has_what_was_on_a_lost_host_from_its_peer(tmp_path: Path) -> None:
    before = killed(tmp_path, FOUR, overrides=PEERS)
    lose("b")
    after = live(tmp_path, hosts=["a", "a", "e", "e", "c", "c", "d", "d"], overrides=PEERS)
    goes_on_at_3(after, before)
    assert {life.restored[1] for life in after[2:4]} == {"peer"}, "the new host had nothing"
    assert "restored step 3 from peers" in after[0].output


def test_a_model_on_the_meta_device_gets_its_memory_from_a_peer(tmp_path: Path) -> None:
    before = killed(tmp_path, ["a", "b"], overrides=PEERS)
    lose("b")
    after = live(tmp_path, hosts=["a", "c"], overrides=PEERS, state={"on_meta": True})
    goes_on_at_3(after, before)
    assert after[1].restored[1] == "peer"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("lost", "from_memory"), [("bc", True), ("a", True), ("bd", False), ("ac", False)], ids=lambda value: str(value)
)
def test_neighbours_may_be_lost_together_but_not_a_host_and_its_peer(
    lost: str, from_memory: bool, tmp_path: Path
) -> None:
    before = killed(tmp_path, FOUR, overrides=PEERS)
    lose(*lost)
    after = live(tmp_path, hosts=FOUR, overrides=PEERS)
    if from_memory:
        goes_on_at_3(after, before)
    else:
        begins_with_the_disk(after)
        assert not any("ERROR" in life.output for life in after)


def test_what_was_at_its_peers_stays_until_something_newer_is(tmp_path: Path) -> None:
    before = killed(tmp_path, ["a", "b"], overrides=PEERS)
    second = live(tmp_path, hosts=["a", "b"], steps=5, end="kill", overrides=SLOW)  # dies while it sends
    goes_on_at_3(second, before)
    lose("b")
    goes_on_at_3(live(tmp_path, hosts=["a", "b"], overrides=PEERS), before)


@pytest.mark.soak
def test_a_host_that_is_lost_before_anything_is_at_its_peer_leaves_the_disk(tmp_path: Path) -> None:
    live(tmp_path, hosts=["a", "b"], steps=3, durable=[1], end="kill", overrides=SLOW)
    lose("b")
    begins_with_the_disk(live(tmp_path, hosts=["a", "b"], overrides=PEERS))


@pytest.mark.soak
def test_a_given_host_has_the_copies(tmp_path: Path) -> None:
    plan = [*PEERS, "checkpoint.recovery.peers={a:b,b:a,c:a}"]
    before = killed(tmp_path, ["a", "b", "c"], overrides=plan)
    lose("b", "c")
    goes_on_at_3(live(tmp_path, hosts=["a", "b", "c"], overrides=plan), before)


@pytest.mark.soak
def test_two_copies_outlive_two_hosts_of_three(tmp_path: Path) -> None:
    plan = [*PEERS, "checkpoint.recovery.replicas=2"]
    before = killed(tmp_path, ["a", "b", "c"], overrides=plan)
    lose("a", "b")
    goes_on_at_3(live(tmp_path, hosts=["x", "y", "c"], overrides=plan), before)


@pytest.mark.soak
def test_fewer_ranks_on_other_hosts_go_on_too(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state": {"resized": "keep"}}
    killed(tmp_path, ["a", "a", "b", "b"], overrides=PEERS, **state)
    lose("a")
    after = live(tmp_path, hosts=["b", "x"], overrides=PEERS, **state)
    assert [life.restored[0] for life in after] == [3, 3] and after[1].restored[1] == "peer"


@pytest.mark.soak
def test_a_damaged_copy_is_set_aside_by_all_ranks(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state": {"frozen": 1 << 10}}
    killed(tmp_path, ["a", "b"], overrides=PEERS, **state)
    lose("a")
    (client,) = clients().values()
    flip_images(client, struct.pack("2f", 500.0, 501.0))
    begins_with_the_disk(live(tmp_path, hosts=["a", "b"], overrides=PEERS, **state))


def test_a_run_ends_at_once_while_a_snapshot_is_being_sent(tmp_path: Path) -> None:
    ended = live(tmp_path, hosts=["a", "b"], steps=3, overrides=SLOW)
    assert not clients() and not any("WARNING" in life.output or "ERROR" in life.output for life in ended)
    live(tmp_path, hosts=["a", "b"], steps=3, end="raise", overrides=SLOW)
    assert {life.restored[0] for life in live(tmp_path, hosts=["a", "b"], overrides=PEERS)} == {3}


def test_with_one_host_all_is_as_without_peers(tmp_path: Path) -> None:
    killed_there = live(tmp_path, hosts=["a", "a"], steps=3, end="kill", overrides=PEERS)
    assert "all ranks are on one host" in killed_there[0].output
    assert {life.restored for life in live(tmp_path, hosts=["a", "a"], overrides=PEERS)} == {(3, "memory")}
