"""One damaged answer of a disk or a network is not a damaged checkpoint; two are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_step

from ckpt_component import CheckpointCorruptError, build_checkpointer, build_manager
from ckpt_component.core.storage.files import FileStorage

OPTIONS = ["checkpoint.save.every_steps=1", "checkpoint.keep.last=5"]
STATES: dict[str, Any] = {
    "small tensors": {"a": torch.arange(100.0), "b": torch.arange(50.0)},
    "a large tensor": {"a": torch.arange(200_000.0)},
    "an object": {"a": "text" * 50, "b": [1, 2, 3]},
}


def saved(root: Path, state: dict[str, Any], first: int = 1) -> None:
    with build_manager("sync", OPTIONS, dir=root) as manager:
        for step in range(first, 3):
            manager.save(step, state)


def damage_answers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Flip a bit of the first answers about a data file of step 2; its bytes on the disk are whole."""
    left, real = [count], os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        read = real(fd, buffers, offset)
        if left[0] and read and "iter_0000002/" in os.readlink(f"/proc/self/fd/{fd}"):
            left[0] -= 1
            buffers[0][read // 2] ^= 4
        return read

    monkeypatch.setattr(os, "preadv", preadv)


def damage_small_files(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    left, real = [1], FileStorage.read

    def read(fs: FileStorage, path: str, limit: int) -> bytes:
        data = bytearray(real(fs, path, limit))
        if "iter_0000002" in path and path.endswith(name) and left and left.pop():
            data[len(data) // 2] ^= 4
        return bytes(data)

    monkeypatch.setattr(FileStorage, "read", read)


DAMAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "data": lambda monkeypatch: damage_answers(monkeypatch, 1),
    "index": lambda monkeypatch: damage_small_files(monkeypatch, "integrity-0.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", STATES)
def test_a_second_answer_is_believed(
    kind: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, STATES[kind])
    DAMAGES[damage](monkeypatch)
    target = {key: torch.zeros_like(v) if torch.is_tensor(v) else type(v)() for key, v in STATES[kind].items()}
    with caplog.at_level(logging.WARNING), build_manager("sync", OPTIONS, dir=tmp_path) as manager:
        assert manager.restore(target) == 2 and manager.steps() == [1, 2]
    for key, value in STATES[kind].items():
        assert torch.equal(target[key], value) if torch.is_tensor(value) else target[key] == value
    (warning,) = [message for message in caplog.messages if "read again: the stored bytes are whole" in message]
    assert "iter_0000002/" in warning


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_believes_a_second_answer(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, STATES["a large tensor"])
    DAMAGES[damage](monkeypatch)
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.verify(tmp_path / "iter_0000002")
    assert "read again: the stored bytes are whole" in caplog.text


def test_what_verifies_before_it_is_set_aside_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, STATES["small tensors"], first=0)
    flip_step(tmp_path, 1)
    damage_answers(monkeypatch, 2)
    with build_manager("sync", OPTIONS, dir=tmp_path) as manager:
        assert manager.restore({"a": torch.zeros(100), "b": torch.zeros(50)}) == 0
        assert manager.steps() == [0, 2]  # step 1 is damaged
    assert "iter_0000002 was found damaged, and is whole now" in caplog.text


def test_what_is_damaged_in_both_answers_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, STATES["small tensors"])
    (tmp_path / "iter_0000001").rename(tmp_path / "elsewhere")
    damage_answers(monkeypatch, 2)
    with (
        build_manager("sync", OPTIONS, dir=tmp_path) as manager,
        pytest.raises(CheckpointCorruptError, match="damaged"),
    ):
        manager.restore({"a": torch.zeros(100), "b": torch.zeros(50)})
