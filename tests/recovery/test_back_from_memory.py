"""A run that was killed goes on at its last snapshot, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshots import client_of, clients, kill, live
from waiting import eventually

pytestmark = pytest.mark.usefixtures("left_on_purpose")


def test_the_next_run_goes_on_where_the_killed_one_was(tmp_path: Path) -> None:
    (whole,) = live(tmp_path / "whole", recovery=False, steps=6)
    (killed,) = live(tmp_path, steps=4, end="kill")
    (after,) = live(tmp_path, steps=6)
    assert after.restored == (4, "memory") and "restored step 4 from memory" in after.output
    assert after.told["began"] == killed.told["digests"]["4"] == whole.told["digests"]["4"]
    assert after.told["losses"] == {step: whole.told["losses"][step] for step in ("5", "6")}
    assert after.told["digests"]["6"] == whole.told["digests"]["6"]
    assert after.told["steps"] == [], "nothing was written"


def test_two_ranks_go_on_where_they_were_killed(tmp_path: Path) -> None:
    killed = live(tmp_path, world_size=2, steps=3, durable=[1], end="kill")
    after = live(tmp_path, world_size=2)
    assert [life.restored for life in after] == [(3, "memory")] * 2
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in killed]


@pytest.mark.slow
def test_a_model_on_the_meta_device_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    whole = live(tmp_path / "whole", world_size=2, recovery=False, steps=6)
    killed = live(tmp_path, world_size=2, steps=3, durable=[1], end="kill")
    after = live(tmp_path, world_size=2, steps=6, state={"on_meta": True})
    assert [life.restored for life in after] == [(3, "memory")] * 2
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in killed]
    assert [life.told["digests"]["6"] for life in after] == [life.told["digests"]["6"] for life in whole]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_where_a_run_was_killed(tmp_path: Path, before: int, now: int) -> None:
    killed = live(tmp_path, world_size=before, steps=3, durable=[1], end="kill")
    after = live(tmp_path, world_size=now, steps=4)
    assert [life.restored for life in after] == [(3, "memory")] * now
    assert "restored step 3 from memory" in after[0].output
    assert {life.told["began"] for life in after} == {killed[0].told["digests"]["3"]}
    eventually(lambda: not clients(), what="its first snapshot ends all of those before")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_all_fall_back_to_the_disk_when_one_server_of_two_is_gone(tmp_path: Path, first: int) -> None:
    live(tmp_path, world_size=2, steps=3, durable=[1], end="kill")
    kill(client_of(first))
    # Without the leader's server, what the other one has looks unfinished, and is waited for.
    after = live(tmp_path, world_size=2, overrides=["checkpoint.timeouts.close=3s"])
    assert [life.restored for life in after] == [(1, "storage")] * 2
    assert not any("is damaged" in life.output or "ERROR" in life.output for life in after)


PARTS = [
    ["checkpoint/writer=torch_save"],
    ["checkpoint/stager=zero_overhead"],
    ["checkpoint/stager=pinned"],
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(part.split("=")[1] for part in parts))
def test_every_writer_and_stager_is_restored_from_memory(tmp_path: Path, parts: list[str]) -> None:
    (killed,) = live(tmp_path, overrides=parts, steps=3, durable=[2], end="kill")
    (after,) = live(tmp_path, overrides=parts)
    assert after.restored == (3, "memory") and after.told["began"] == killed.told["digests"]["3"]


@pytest.mark.slow
def test_thousands_of_small_tensors_and_weights_that_never_change(tmp_path: Path) -> None:
    plan: dict[str, Any] = {
        "state": {"small": 2000, "frozen": 1 << 20},
        "overrides": ["checkpoint.reuse.frozen=[frozen]"],
    }
    (killed,) = live(tmp_path, **plan, steps=4, durable=[1, 2, 3], end="kill")
    (after,) = live(tmp_path, **plan)
    assert after.restored == (4, "memory") and after.told["began"] == killed.told["digests"]["4"]


@pytest.mark.slow
def test_a_third_run_goes_on_where_the_second_was_killed(tmp_path: Path) -> None:
    live(tmp_path, steps=2, end="kill")
    (second,) = live(tmp_path, steps=4, end="kill")
    (third,) = live(tmp_path)
    assert (second.restored, third.restored) == ((2, "memory"), (4, "memory"))
    assert third.told["began"] == second.told["digests"]["4"]


@pytest.mark.slow
def test_a_run_that_died_before_its_first_snapshot_loses_nothing(tmp_path: Path) -> None:
    live(tmp_path, steps=2, end="kill")
    (second,) = live(tmp_path, end="kill")
    (third,) = live(tmp_path)
    assert second.restored == third.restored == (2, "memory")
    assert third.told["began"] == second.told["began"]
