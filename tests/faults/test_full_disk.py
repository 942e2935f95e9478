"""Row 5: a disk that is full at any byte of a save, with one and two parallel writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.forker import Forker


@pytest.fixture
def small_disk(forker: Forker, tmp_path: Path) -> Iterator[str]:
    """A folder for a tmpfs, which the test's child mounts and this takes away."""
    if forker.unmountable:
        pytest.skip(forker.unmountable)
    folder = tmp_path / "disk"
    folder.mkdir()
    yield str(folder)
    forker.here("faults.mounts:unmount", folder=str(folder))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_05_a_disk_that_is_full_at_any_page(preset: str, workers: int, forker: Forker, small_disk: str) -> None:
    overrides = [f"checkpoint.writer.workers={workers}"]
    found = forker.run("faults.scenarios:fill_disk", root=small_disk, preset=preset, overrides=overrides)
    assert found["wrong"] == []
    assert found["failures"] > 8


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_05_a_disk_without_inodes(preset: str, forker: Forker, small_disk: str) -> None:
    found = forker.run("faults.scenarios:fill_disk", root=small_disk, preset=preset, overrides=[], inodes=True)
    assert found["wrong"] == []
    assert found["failures"] > 5
