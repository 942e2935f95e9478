"""`ckpt ls`, and how commands find folders of checkpoints and checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointConfigError, CheckpointNotFoundError, build_manager
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.formats.checkpoints import find_checkpoint, find_root


def test_lists_checkpoints_with_the_newest_and_the_best(ckpt: Callable[..., Any], root: Path) -> None:
    listed = ckpt("ls", root)
    lines = [line.split() for line in listed.out.splitlines()[1:5]]
    assert listed.code == 0 and [line[0] for line in lines] == ["100", "200", "300", "400"]
    assert listed.out.count("newest") == listed.out.count("best") == 1
    assert "best (val_loss 0)" in listed.out.splitlines()[2] and "newest" in listed.out.splitlines()[4]
    data = ckpt("ls", root, "--json").json
    assert (data["newest"], data["best"], data["metric"]) == (400, 200, "val_loss")
    first = data["entries"][0]
    size = sum(file.stat().st_size for file in (root / "iter_0000100").iterdir() if file.name != "manifest.json")
    assert (first["nbytes"], first["ranks"], first["state"], first["step"]) == (size, 1, "committed", 100)
    assert abs(first["time"] - (root / "iter_0000100").stat().st_mtime) < 5


def test_sizes_that_sum_to_more_than_is_taken(ckpt: Callable[..., Any], root: Path, sharing: Path) -> None:
    assert ckpt("ls", sharing).out.endswith(" MB; files are shared, see ckpt du\n")
    assert "share" not in ckpt("ls", root).out


def test_says_what_else_is_there(ckpt: Callable[..., Any], root: Path) -> None:
    old = time.time() - 3600
    (root / "iter_0000100" / "__0_0.distcp").unlink()
    (root / "iter_0000300" / "manifest.json").unlink()  # a torn one of ours
    dead, alive = (new_attempt(FileStorage(), str(root / f"iter_000050{number}"), new_token()) for number in range(2))
    for attempt in (dead, alive):
        shutil.copytree(root / "iter_0000400", attempt.staging)
        os.utime(attempt.staging, (old, old))
    shutil.copytree(root / "iter_0000200", root / f".ckpt-quarantine.iter_0000050.{new_token()}")
    trash = root / f".ckpt-trash.iter_0000060.{new_token()}"
    shutil.copytree(root / "iter_0000200", trash)
    os.utime(trash, (old, old))
    torch.save({"a": torch.ones(2)}, root / "pretrained.pt")
    (root / "step-7").mkdir()
    (root / "step-7" / "model.safetensors").write_bytes(b"x")
    lock = AttemptLock(FileStorage(), alive)
    try:
        entries = ckpt("ls", root, "--json").json["entries"]
        text = ckpt("ls", root).out
    finally:
        lock.close()
    states = {
        (entry["step"], entry["name"].split(".")[1] if entry["name"][0] == "." else ""): entry for entry in entries
    }
    assert {key: entry["state"] for key, entry in states.items()} == {
        (7, ""): "unverified",
        (50, "ckpt-quarantine"): "debris",
        (60, "ckpt-trash"): "debris",
        (100, ""): "damaged",
        (200, ""): "committed",
        (300, ""): "damaged",
        (400, ""): "committed",
        (500, "ckpt-tmp"): "debris",
        (501, "ckpt-tmp"): "in progress",
        (None, ""): "unverified",
    }
    assert "__0_0.distcp is missing" in states[100, ""]["why"]
    assert max(map(len, text.splitlines())) <= 100
    assert "3 checkpoints" not in text and "4 checkpoints" in text and "2 damaged" in text and "3 debris" in text


def test_an_empty_folder_and_no_folder(ckpt: Callable[..., Any], tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert ckpt("ls", tmp_path / "empty").out == f"no checkpoints in {tmp_path / 'empty'}\n"
    none = ckpt("ls", tmp_path / "checkpoint")
    assert none.code == 2 and f"did you mean {root}?" in none.err and none.err.count("\n") == 1
    itself = ckpt("ls", root / "iter_0000100")
    assert itself.code == 2 and "ckpt show" in itself.err


def test_arguments_that_name_a_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    for argument, step in {
        "checkpoints": 400,
        "checkpoints@newest": 400,
        "checkpoints@best": 200,
        "checkpoints@100": 100,
        "checkpoints/iter_0000300/": 300,
        str(root / "iter_0000300"): 300,
    }.items():
        assert find_checkpoint(argument).path == str(root / f"iter_{step:07d}")
        assert find_checkpoint(argument).step == step
    (root / "iter_0000400" / "__0_0.distcp").unlink()
    assert find_checkpoint("checkpoints").step == 300, "the damaged one is not the newest"
    assert find_checkpoint("checkpoints@400").step == 400, "but can be named"
    assert find_root("checkpoints").path == str(root)


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        ("checkpoints@250", CheckpointNotFoundError, "the nearest is .*checkpoints@200"),
        ("checkpoints/iter_0000310", CheckpointNotFoundError, "the nearest is .*checkpoints@300"),
        ("checkpoints@newst", CheckpointConfigError, "type .*checkpoints@newest"),
        ("checkpoint", CheckpointNotFoundError, "did you mean .*checkpoints"),
        ("nothing@newest", CheckpointNotFoundError, "does not exist"),
    ],
)
def test_arguments_that_name_none(
    argument: str, error: type[Exception], text: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    with pytest.raises(error, match=text):
        find_checkpoint(argument)


def test_no_best_without_a_metric(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"a": 1}, metrics={"val_loss": 0.5})
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint\.keep\.best\.metric"):
        find_checkpoint(f"{tmp_path}@best")


@pytest.mark.parametrize("command", ["ls", "du", "show", "log", "diff"])
def test_starts_without_torch(command: str, root: Path) -> None:
    arguments = [str(root)] if command in ("ls", "du", "log") else [f"{root}@100"] * (2 if command == "diff" else 1)
    code = (
        "import sys\nfrom ckpt_component.cli.app import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as left: assert not left.code, left.code\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_file_of_weights_hides_no_checkpoints(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    itself = ckpt("ls", tmp_path)
    assert itself.code == 2 and "is a checkpoint, not a folder" in itself.err
    (tmp_path / "last").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "last" / "pytorch_model.bin")
    assert "unverified (last)" in ckpt("ls", tmp_path).out


def test_other_programs_binaries_are_no_checkpoints(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "firmware.bin").write_bytes(b"x")
    assert ckpt("ls", tmp_path).out == f"no checkpoints in {tmp_path}\n"
    (tmp_path / "bin" / "config.json").write_text("{}")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "weights.bin").write_bytes(b"x")
    listed = ckpt("ls", tmp_path).out
    assert "(bin)" in listed and "7" in listed


def test_it_names_the_folders_below_that_hold_checkpoints(
    ckpt: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert ckpt("ls", ".").out.splitlines()[1:] == ["checkpoints/ holds 4: ckpt ls checkpoints"]
    assert ckpt("ls", root.parent).out.splitlines()[1:] == [f"checkpoints/ holds 4: ckpt ls {root}"]
    inner = Path("multirun", "2026-11-26", "10-00-00", "0")
    inner.mkdir(parents=True)
    root.rename(inner / "checkpoints")
    for command in ("ls", "du"):
        found = ckpt(command, "multirun").out.splitlines()[1:]
        below = "2026-11-26/10-00-00/0/checkpoints"
        assert found == [f"{below}/ holds 4: ckpt {command} multirun/{below}"]
