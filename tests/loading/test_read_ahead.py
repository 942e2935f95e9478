"""What is announced to the disk: all that is read, a bounded way ahead, and nothing where it is in memory already."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer
from ckpt_component.core.storage import open_files
from ckpt_component.core.storage.file_set import RangeRead
from ckpt_component.core.storage.open_files import OpenFiles

BATCH = 1 << 20


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Begin and end of what is announced, of a file of which half is in memory."""
    extents: list[tuple[int, int]] = []
    monkeypatch.setattr(OpenFiles, "_batch_bytes", BATCH)
    monkeypatch.setattr(open_files, "share_in_memory", lambda ranges: 0.5)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, advice: extents.append((start, start + length)))
    return extents


@pytest.mark.parametrize("processors", [1, 2])
def test_all_is_announced_before_it_is_read_and_only_a_bounded_way_ahead(
    processors: int, tmp_path: Path, announced: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    size, step = 20 * BATCH, BATCH // 4
    (tmp_path / "file").write_bytes(bytes(size))
    leads = []

    def read(offset: int) -> None:
        end = max(end for _, end in announced)
        assert end >= min(offset + step, size)
        leads.append(end - offset)

    with OpenFiles(str(tmp_path)) as files:
        files.read_all(
            [RangeRead("file", start, step, lambda start=start: read(start)) for start in range(0, size, step)]
        )
    assert max(leads) <= (2 * processors + 2) * BATCH
    assert sorted(announced) == [(start, start + BATCH) for start in range(0, size, BATCH)]


def test_neighbours_are_announced_as_one(tmp_path: Path, announced: list[tuple[int, int]]) -> None:
    (tmp_path / "file").write_bytes(bytes(BATCH))
    far = 100 + open_files.GAP_BYTES + 1
    with OpenFiles(str(tmp_path)) as files:
        ranges = [(0, 50), (20, 10), (60, 40), (far, 5)]
        files._read_ahead([RangeRead("file", start, length, lambda: None) for start, length in ranges])
    assert announced == [(0, 100), (far, far + 5)]


def test_what_is_in_memory_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {str(number): torch.rand(100_000) for number in range(10)}
    calls: list[object] = []
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "one")
        for path in (tmp_path / "one").rglob("*"):
            assert path.is_dir() or path.read_bytes()
        monkeypatch.setattr(os, "posix_fadvise", lambda *call: calls.append(call))
        checkpointer.load(tmp_path / "one")
    assert not calls


def test_a_disk_that_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def refused(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    state = {str(number): torch.rand(100_000) for number in range(10)}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "one")
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        monkeypatch.setattr(open_files, "share_in_memory", lambda ranges: 0.5)
        monkeypatch.setattr(os, "posix_fadvise", refused)
        loaded = checkpointer.load(tmp_path / "one")
    assert caplog.text.count("posix_fadvise failed ([Errno 22]") == 1
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
