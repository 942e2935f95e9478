"""How long a snapshot stays after its run, by how the run ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshots import clients, finish_lives, gone, live, sockets, start_lives
from waiting import eventually

SHORT = ["checkpoint.recovery.lease=1s"]


@pytest.mark.parametrize("end", ["close", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path, end: str) -> None:
    live(tmp_path, steps=2, end=end)
    eventually(lambda: not clients(), what="a snapshot server is left")
    assert sockets() == []


@pytest.mark.slow
@pytest.mark.usefixtures("left_on_purpose")
@pytest.mark.parametrize("end", ["raise", "outside"])
def test_a_run_that_ends_with_an_exception_or_unclosed_is_kept_for_its_lease(tmp_path: Path, end: str) -> None:
    (first,) = live(tmp_path, steps=2, end=end, overrides=["checkpoint.recovery.lease=60s"])
    (second,) = live(tmp_path, overrides=SHORT, end="kill")
    assert second.restored == (2, "memory") and second.told["began"] == first.told["digests"]["2"]


@pytest.mark.slow
def test_all_is_gone_when_the_lease_is_over(tmp_path: Path) -> None:
    live(tmp_path, steps=2, end="kill", overrides=SHORT)
    left = list(clients().values())
    assert len(left) == 1, "it stays for a second"
    gone(*left, seconds=10)
    assert sockets() == []
    (after,) = live(tmp_path)
    assert after.restored == (None, None)


@pytest.mark.slow
def test_a_run_that_has_restored_holds_the_server_until_its_first_snapshot(tmp_path: Path) -> None:
    live(tmp_path, steps=2, end="kill", overrides=["checkpoint.recovery.lease=5s"])
    (first,) = clients().values()
    ranks = start_lives(tmp_path, end="hang")
    eventually(lambda: (tmp_path / "ready-0").exists(), 40)
    with pytest.raises(AssertionError):
        gone(first, seconds=6)  # longer than its lease
    (tmp_path / "go").touch()
    (second,) = finish_lives(ranks)
    assert second.restored == (2, "memory")
    gone(first, seconds=10)
    assert sockets() == []


@pytest.mark.slow
def test_the_first_snapshot_of_the_next_run_ends_the_server_before_its_lease(tmp_path: Path) -> None:
    live(tmp_path, steps=2, end="kill")
    (first,) = clients().values()
    live(tmp_path, steps=3)
    gone(first)
    assert not clients() and sockets() == []


def test_without_recovery_no_socket_is_made_and_none_is_read(tmp_path: Path) -> None:
    os.environ["CKPT_RUNTIME_DIR"] = "not an absolute path, which recovery would refuse"
    (life,) = live(tmp_path, recovery=False, steps=2, durable=[2])
    assert life.told["steps"] == [2] and not Path(os.environ["CKPT_RUNTIME_DIR"]).exists()
