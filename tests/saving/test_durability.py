"""Every file of a checkpoint is on the disk before the checkpoint can be found, by the operations in their order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer
from ckpt_component.core.storage.failpoint_fs import read_log

#: What changes the content of a file.
WRITES = ("write", "copy", "truncate")


@pytest.mark.parametrize(
    ("preset", "commit", "writer", "io"),
    [
        ("sync", "rename", "dcp", "buffered"),
        ("sync", "manifest", "dcp", "auto"),
        ("sync", "rename", "torch_save", "auto"),
        ("sync", "rename", "safetensors", "auto"),
        ("async_persistent", "rename", "dcp", "auto"),
    ],
)
def test_every_file_is_synced_after_its_last_write_and_before_the_commit(
    preset: str, commit: str, writer: str, io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    path = tmp_path / "one"
    state = {"weight": torch.ones(70_000), "small": torch.ones(3)}
    if writer != "safetensors":
        state["epoch"] = 3  # type: ignore[assignment]
    parts = [f"checkpoint/writer={writer}", f"checkpoint.commit={commit}", f"checkpoint.writer.io={io}"]
    with build_checkpointer(preset, parts) as checkpointer:
        checkpointer.save(state, path)
    operations = read_log(str(tmp_path / "log"))
    becomes_visible = next(
        number
        for number, each in enumerate(operations)
        if (each.operation, each.path) in (("rename_new", str(path)), ("link", str(path / "manifest.json")))
    )
    names = {file.name for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    assert len(names) >= 2
    for name in names:
        done = [
            (number, each.operation)
            for number, each in enumerate(operations[:becomes_visible])
            if os.path.basename(each.path) == name
        ]
        written = max((number for number, operation in done if operation in WRITES), default=-1)
        synced = max((number for number, operation in done if operation == "sync"), default=-1)
        assert synced > written, (name, done)
