"""A disk that is full at any byte of a save, with one and two parallel writers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from faults.lives import KEEP
from faults.workloads import newest_ack
from forker import Forker
from strides import in_turn

pytestmark = pytest.mark.slow

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def small_disk(forker: Forker, tmp_path: Path) -> Iterator[str]:
    """A folder for a tmpfs, which the test's child mounts and this takes away."""
    if forker.unmountable:
        pytest.skip(forker.unmountable)
    folder = tmp_path / "disk"
    folder.mkdir()
    yield str(folder)
    forker.here("faults.mounts:unmount", folder=str(folder))


@pytest.mark.parametrize(("preset", "workers"), in_turn(product(["sync", "async_persistent"], [1, 2]), 2))
def test_a_disk_that_is_full_at_any_page(preset: str, workers: int, forker: Forker, small_disk: str) -> None:
    overrides = [f"checkpoint.writer.workers={workers}"]
    found = forker.run("faults.scenarios:fill_disk", root=small_disk, preset=preset, overrides=overrides)
    assert found["wrong"] == []
    assert found["failures"] > 8


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_disk_without_inodes(preset: str, forker: Forker, small_disk: str) -> None:
    found = forker.run("faults.scenarios:fill_disk", root=small_disk, preset=preset, overrides=[], inodes=True)
    assert found["wrong"] == []
    assert found["failures"] > 5


@pytest.mark.parametrize("preset", [pytest.param("sync", marks=pytest.mark.soak), "async_persistent"])
def test_a_disk_that_is_full_for_two_ranks(preset: str, forker: Forker, small_disk: str, tmp_path: Path) -> None:
    """Both ranks hear of it, nothing of the save is left, and the next run saves once there is room."""
    root, acks, failures = f"{small_disk}/root", str(tmp_path / "acks"), 0
    overrides = ["checkpoint.min_free_bytes=null"]  # nobody looks beforehand, so that the write itself meets it

    def resize(size: str, *, remount: bool = True) -> None:
        forker.here("faults.mounts:mount_tmpfs", folder=small_disk, options=f"size={size}", remount=remount)

    def live(name: str) -> list[str | None]:
        common: dict[str, Any] = {
            "root": root,
            "acks": acks,
            "saves": 1,
            "log": str(tmp_path / name),
            "overrides": overrides,
            "all_live": True,
        }
        pids = [
            forker.fork("faults.lives:live_on_ranks", rank=rank, world_size=2, preset=preset, **common)
            for rank in range(2)
        ]
        ended = [forker.wait(pid) for pid in pids]
        assert all(each.code == 0 and each.value["violations"] == [] for each in ended), ended
        assert forker.drain() == []
        return [each.value["failed"] for each in ended]

    resize("16m", remount=False)
    assert live("first") == [None, None] and newest_ack(acks) == 1
    for room in range(0, 400 * PAGE, 5 * PAGE):
        resize("16m")
        # Which also makes a save of its own.
        wrong = forker.run("faults.workloads:check", root=root, acks=acks, keep=KEEP)
        assert wrong == [], f"before a room of {room}: {wrong}"
        used = forker.here("faults.mounts:used_bytes", folder=small_disk)
        resize(str(used + room))
        failed = live(f"room{room}")
        if failed == [None, None]:
            break
        assert all(text is not None and "No space left on device" in text for text in failed), failed
        failures += 1
    print(f"{preset}: {failures} failed saves of two ranks")
    assert failures > 2 and newest_ack(acks) > 1
