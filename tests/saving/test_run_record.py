"""What a checkpoint says about its run: config, versions, git commit and metrics; written with it, and read back."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import edit_manifest, note_file
from ranks import run_ranks
from strides import in_turn

import ckpt_component
from ckpt_component import (
    CheckpointCorruptError,
    CheckpointManager,
    CheckpointNotFoundError,
    MissingKeysError,
    build_checkpointer,
    build_manager,
    stored_config,
    stored_metrics,
)
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.factory.launch import commit_of

COMMIT = "0123456789abcdef" * 2 + "01234567"


def saved(root: Path, *overrides: str, preset: str = "sync", step: int = 1, **options: Any) -> Path:
    with build_manager(preset, list(overrides), dir=root) as manager:
        manager.save(step, {"weight": torch.full((100,), float(step))}, **options)
        return Path(manager.path_of(step))


@pytest.mark.parametrize(
    ("preset", "commit", "writer"),
    in_turn(product(["sync", "async_persistent"], ["rename", "manifest"], ["dcp", "torch_save", "safetensors"]), 2),
)
def test_config_versions_and_metrics_are_read_back(writer: str, commit: str, preset: str, tmp_path: Path) -> None:
    overrides = [f"checkpoint/writer={writer}", f"checkpoint.commit={commit}"]
    path = saved(tmp_path, *overrides, preset=preset, metrics={"loss": 0.5, "diverged": float("-inf")})
    stored = stored_config(path)
    assert stored.config == stored.resolved and stored.config["checkpoint"]["commit"] == commit
    assert stored.versions == {
        "ckpt_component": ckpt_component.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    assert stored_metrics(str(path)) == {"loss": 0.5, "diverged": float("-inf")}
    target = {"weight": torch.zeros(100)}
    with build_manager("sync", overrides, dir=tmp_path) as manager:
        assert manager.restore(target) == 1 and target["weight"].eq(1).all()


def test_the_record_is_a_file_of_the_checkpoint_like_others(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = read_manifest(FileStorage(), str(path)) or {}
    (entry,) = [entry for entry in manifest["files"] if entry["name"] == "run.json"]
    assert entry["size"] == (path / "run.json").stat().st_size and "crc32" in entry
    (path / "run.json").unlink()  # a checkpoint that lacks a file is none
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.steps() == []
    with pytest.raises(CheckpointCorruptError, match=r"run\.json cannot be read: No such file"):
        stored_config(path)


def test_the_other_files_are_those_of_a_checkpoint_without_a_record(tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"weight": torch.full((100,), 1.0)}, tmp_path / "one")
    names = sorted(os.listdir(tmp_path / "one"))
    assert sorted(os.listdir(path)) == sorted([*names, "run.json"])
    for name in set(names) - {"manifest.json"}:
        assert (path / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_dcp_reads_a_checkpoint_with_a_record(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    target = {"weight": torch.zeros(100)}
    dcp.load(target, checkpoint_id=saved(tmp_path), no_dist=True)
    assert target["weight"].eq(1).all()


def test_reading_it_needs_no_torch(tmp_path: Path) -> None:
    path = saved(tmp_path, metrics={"loss": 0.5})
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckpt_component import stored_config, stored_metrics\n"
        f"print(stored_config({str(path)!r}).versions['torch'], stored_metrics({str(path)!r})['loss'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(torch.__version__), "0.5"], done.stderr


def test_of_another_programs_checkpoint_missing_keys_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"weight": torch.zeros(100), "bias": torch.zeros(1)}

    def refusal(path: Path) -> str:
        with build_checkpointer("sync") as checkpointer, pytest.raises(MissingKeysError, match="bias") as caught:
            checkpointer.load(path, target, strict=True)
        assert caught.value.keys == ["bias"]
        return str(caught.value)

    ours = saved(tmp_path / "ours")
    monkeypatch.setattr("__main__.__spec__", None, raising=False)
    monkeypatch.setattr("__main__.__file__", "/home/me/train.py", raising=False)
    theirs = saved(tmp_path / "theirs")
    monkeypatch.setattr("__main__.__spec__", ModuleSpec("jobs.train.__main__", None))
    assert stored_config(saved(tmp_path / "module")).script == "jobs.train"
    monkeypatch.undo()
    assert stored_config(theirs).script == "train.py"
    assert refusal(theirs) == refusal(ours).replace("ours", "theirs") + " Another script saved it: train.py."


# --- what there is none of ------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_record_says_why(tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"weight": torch.ones(1)}, tmp_path / "one")
    with pytest.raises(CheckpointNotFoundError, match="one has no run.json: build_checkpointer or an older release"):
        stored_config(tmp_path / "one")
    assert stored_metrics(tmp_path / "one") == {}


def test_what_is_no_checkpoint_says_what_to_name(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for read in (stored_config, stored_metrics):
        with pytest.raises(CheckpointNotFoundError, match="gone does not exist; name the folder of a checkpoint"):
            read(tmp_path / "gone")
        with pytest.raises(CheckpointNotFoundError, match=f"name one of the checkpoints in it, such as {path}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[]", "is not the record of a run"),
        (b"{", "is not the record of a run"),
        (b"[" * 100_000, "is not the record of a run"),
        (b'{"config": 1, "resolved": {}, "versions": {}}', "values of other types"),
        (b'{"config": {}, "resolved": {}, "versions": {}, "commit": 1}', "values of other types"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_forged_record_is_refused(content: bytes, text: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="does not match the size and the CRC"):
        stored_config(path)
    note_file(path, "run.json")
    with pytest.raises(CheckpointCorruptError, match=text):
        stored_config(path)


def test_forged_metrics_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, metrics={"loss": 0.5})
    edit_manifest(path, lambda content: {**content, "metrics": {"loss": "low"}})
    with pytest.raises(CheckpointCorruptError, match="gives 'low' as the metric 'loss'"):
        stored_metrics(path)


# --- the git commit -------------------------------------------------------------------------------------------------


def git(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_commit_of_every_form_of_checkout(tmp_path: Path) -> None:
    head, branch = "ref: refs/heads/main\n", f"{COMMIT}\n"
    forms = {
        "loose": {".git/HEAD": head, ".git/refs/heads/main": branch},
        "packed": {
            ".git/HEAD": head,
            ".git/packed-refs": f"# pack-refs\n{'f' * 40} refs/heads/x\n{COMMIT} refs/heads/main\n",
        },
        "detached": {".git/HEAD": branch},
        "worktree": {
            ".git": f"gitdir: {tmp_path}/loose/.git/worktrees/it\n",
            f"{tmp_path}/loose/.git/worktrees/it/HEAD": "ref: refs/heads/side\n",
            f"{tmp_path}/loose/.git/worktrees/it/commondir": "../..\n",
            f"{tmp_path}/loose/.git/refs/heads/side": branch,
        },
        "submodule": {".git": "gitdir: ../detached/.git\n"},
    }
    for name, files in forms.items():
        folder = git(tmp_path / name, files)
        (folder / "deep" / "er").mkdir(parents=True)
        assert commit_of(str(folder)) == commit_of(str(folder / "deep" / "er")) == COMMIT, name


def test_no_commit_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    forms: dict[str, dict[str, str]] = {
        "none": {"file": ""},
        "new": {".git/HEAD": "ref: refs/heads/main\n"},
        "strange": {".git/HEAD": "what is this\n"},
    }
    for name, files in forms.items():
        assert commit_of(str(git(tmp_path / name, files))) is None, name
    assert not caplog.records
    assert commit_of(str(git(tmp_path / "broken", {".git": "gitdir: nowhere\n"}))) is None
    assert "the git commit of" in caplog.text and "could not be read" in caplog.text


def test_a_folder_that_does_not_answer_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "HEAD")  # to open it waits for a writer
    try:
        assert commit_of(str(tmp_path), seconds=0.05) is None
        assert "could not be read within 0.05 s" in caplog.text
    finally:
        (tmp_path / ".git" / "HEAD").write_text(COMMIT)
        for thread in threading.enumerate():
            if thread.name == "ckpt-git":
                thread.join(60)


def test_the_commit_of_the_current_folder_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(git(tmp_path, {".git/HEAD": f"{COMMIT}\n"}))
    assert stored_config(saved(tmp_path / "run")).commit == COMMIT


# --- several ranks, and trainers that die ---------------------------------------------------------------------------


@pytest.mark.slow
def test_of_several_ranks_the_first_writes_the_record(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "best.py", "recorded", 2, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_the_writer_process_commits_alone_has_record_and_metrics(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from ckpt_component import build_manager\n"
        "from ckpt_component.testing import faults\n"
        "manager = build_manager('async_persistent', dir=sys.argv[1])\n"
        "with faults.at('publish').kills('trainer'):\n"
        "    manager.save(1, {'weight': torch.ones(10)}, metrics={'loss': 0.25})\n"
        "    manager.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, timeout=100, check=False)
    assert done.returncode == -9, done.stderr
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.restore({"weight": torch.zeros(10)}) == 1  # waits for the writer process
    path = tmp_path / "iter_0000001"
    assert (read_manifest(FileStorage(), str(path)) or {})["committed_by"] == "writer"
    assert stored_metrics(path) == {"loss": 0.25} and stored_config(path).versions["python"]


def test_without_a_checkpointer_nothing_is_recorded(tmp_path: Path) -> None:
    with build_manager("off", dir=tmp_path) as manager:
        assert isinstance(manager, CheckpointManager) and not manager.save(1, {}, metrics={"loss": 1})
    assert json.dumps(os.listdir(tmp_path)) == "[]"
