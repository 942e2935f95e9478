"""What a save does to the disk before it syncs: space is reserved, and writing back begins at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from ckpt_component import CheckpointStorageFullError, build_checkpointer

STATE = {"weight": torch.ones(1 << 20, dtype=torch.uint8)}


@pytest.mark.parametrize(("durability", "begins"), [("power_cut", True), ("process_crash", False)])
def test_what_is_written_is_written_back_at_once_where_it_will_be_synced(
    durability: str, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, length, advice: advised.append((start, length)) if advice == 4 else None
    )
    with build_checkpointer("sync", [f"checkpoint.durability={durability}"]) as checkpointer:
        checkpointer.save(STATE, tmp_path / "one")
    assert (sum(length for _, length in advised) >= 1 << 20) == begins


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []

    def reserve(fd: int, start: int, size: int) -> None:
        reserved.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def never(*_: object) -> int:
        raise AssertionError("it was written to")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with build_checkpointer("sync") as checkpointer, monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", never)
        with pytest.raises(CheckpointStorageFullError):
            checkpointer.save(STATE, tmp_path / "one")
    assert max(reserved) > 1 << 20
    assert os.listdir(tmp_path) == []


def test_where_space_cannot_be_reserved_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with build_checkpointer("sync") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            checkpointer.save(STATE, tmp_path / "one")
        assert torch.equal(checkpointer.load(tmp_path / "one")["weight"], STATE["weight"])
