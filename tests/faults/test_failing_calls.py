"""Rows 12 and 16: each file operation of a save fails, once and for good; short writes; a block of one of two writers."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from faults.forker import Forker


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_16_every_operation_fails(preset: str, sticky: bool, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_everywhere",
        timeout=110,
        root=str(tmp_path / "root"),
        preset=preset,
        operation="any",
        code="EIO",
        sticky=sticky,
        logs=str(tmp_path),
    )
    assert found["wrong"] == []
    assert found["aborted"] > 20
    assert found["survived"] > 8  # of pointer and retirement


@pytest.mark.parametrize("operation", ["names", "size", "read", "lock_shared"])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_16_looking_fails(preset: str, operation: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_everywhere",
        root=str(tmp_path / "root"),
        preset=preset,
        operation=operation,
        code="EIO",
        sticky=False,
        logs=str(tmp_path),
    )
    assert found["wrong"] == []
    assert found["aborted"] + found["survived"] > 0


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_16_short_writes_are_continued(preset: str, forker: Forker, tmp_path: Path) -> None:
    found = forker.run("faults.scenarios:cut_writes", root=str(tmp_path / "root"), preset=preset, logs=str(tmp_path))
    assert found["fired"] >= 5
    assert found["error"] is None and found["wrong"] == []


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_row_12_a_writer_thread_fails_in_the_nth_block(preset: str, block: int, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_block", root=str(tmp_path / "root"), preset=preset, block=block, logs=str(tmp_path)
    )
    assert found["fired"] == 1
    assert found["errno"] == errno.EIO
    assert found["there"] == []  # no `.metadata`, nothing at all
    assert found["again"] is None and found["wrong"] == []
