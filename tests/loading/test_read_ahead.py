"""What is announced to the disk: nothing that is in memory already; and a disk that takes no advice is read all the same."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer
from ckpt_component.core.storage import open_files


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
