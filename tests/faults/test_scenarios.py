"""Scenarios that need no enumeration, each by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forker import Forker
from strides import in_turn

PRESETS = ["sync", "async_temporal", "async_persistent", "async_zero_overhead"]


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_step_that_is_there_is_refused_and_not_touched(preset: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run("faults.scenarios:save_again", root=str(tmp_path / "root"), preset=preset)
    assert found["error"] == "CheckpointExistsError"
    assert found["before"] == found["after"]  # names, bytes, and times of change
    assert found["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_the_last_good_step_outlives_failing_newer_ones(preset: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run("faults.scenarios:fail_newest", root=str(tmp_path / "root"), preset=preset, logs=str(tmp_path))
    assert found["errors"] == 5
    assert found["wrong"] == []


@pytest.mark.parametrize("operation", ["unlink", "remove_folder", "rename_new:path=.ckpt-trash"])
def test_a_failing_delete_is_a_warning(operation: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_delete", root=str(tmp_path / "root"), operation=operation, logs=str(tmp_path)
    )
    assert found["fired"] > 0
    assert found["errors"] == [] and "could not be deleted" in found["log"]
    assert found["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", ["sync", *(pytest.param(each, marks=pytest.mark.slow) for each in ("write", "create"))]
)
def test_hung_storage_fails_its_save_by_the_deadline(operation: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:hang", root=str(tmp_path / "root"), operation=operation, log=str(tmp_path / "ops")
    )
    assert found["fired"] == 1
    assert found["error"] == "CheckpointTimeoutError" and "timeouts.write" in found["text"]
    assert "rank 0" in found["text"].lower() and "iter_0000002" in found["text"]
    if operation != "create":
        assert ".distcp" in found["text"]
    assert found["seconds"] < 15
    assert found["workers"][0] != found["workers"][1]
    assert found["wrong"] == []
    assert forker.drain() == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_dev_shm(preset: str, forker: Forker, tmp_path: Path) -> None:
    if forker.unmountable:
        pytest.skip(forker.unmountable)
    forker.here("faults.mounts:mount_tmpfs", folder="/dev/shm", options="size=4m")
    try:
        found = forker.run("faults.scenarios:save_with_small_shm", root=str(tmp_path / "root"), preset=preset)
    finally:
        forker.here("faults.mounts:unmount", folder="/dev/shm")
    assert found == {"same": True, "left": ["taken"], "free": found["free"]}


@pytest.mark.slow
@pytest.mark.parametrize("preset", in_turn(PRESETS, 4))
def test_twenty_saves_leak_nothing(preset: str, forker: Forker, tmp_path: Path) -> None:
    check_leaks(forker.run("faults.scenarios:count_leaks", root=str(tmp_path / "root"), preset=preset, saves=20))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", PRESETS)
def test_two_hundred_saves_leak_nothing(preset: str, forker: Forker, tmp_path: Path) -> None:
    check_leaks(
        forker.run("faults.scenarios:count_leaks", root=str(tmp_path / "root"), preset=preset, saves=200, timeout=1000)
    )


def check_leaks(found: dict[str, list[int]]) -> None:
    print(found)
    megabytes = found.pop("rss_mb")
    assert {key: seen for key, seen in found.items() if seen[-1] > seen[0]} == {}
    assert found["zombies"] == [0, 0, 0]
    assert megabytes[2] - megabytes[1] < 8, megabytes  # what is made once is made in the first half


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_items(forker: Forker, tmp_path: Path) -> None:
    found = forker.run("faults.scenarios:many_items", root=str(tmp_path / "root"), count=100_000, timeout=600)
    print(found)
    assert found["wrong"] == []
    assert found["save_s"] < 120 and found["load_s"] < 120


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_tensor_beyond_four_gigabytes(forker: Forker, tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    if disk.f_bavail * disk.f_frsize < 12 << 30:
        pytest.skip("needs 12 GB of disk")
    found = forker.run("faults.scenarios:large_tensor", root=str(tmp_path / "root"), timeout=900)
    print(found)
    assert found["offset"] > 5 << 30
    assert found["same"]
