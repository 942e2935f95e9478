"""The folder of a run vanishes while it runs: unmounted, renamed, deleted. It is not made again without a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from owners import owned_by

from ckpt_component import CheckpointManager, CheckpointSaveError, build_manager
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.storage import locate
from ckpt_component.core.storage.files import FileStorage

STATE = {"weight": torch.ones(3)}
COMMITS = pytest.mark.parametrize("commit", ["rename", "manifest"])


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    return build_manager(preset, ["checkpoint.save.at_end=false", *overrides], dir=root)


def rename(root: Path) -> None:
    root.rename(root.with_name("moved"))


def replace(root: Path) -> None:
    """As a mount point looks when what was mounted is gone."""
    rename(root)
    root.mkdir()


@COMMITS
@pytest.mark.parametrize("vanish", [shutil.rmtree, rename, replace])
def test_a_save_to_a_folder_that_vanished_fails_and_leaves_nothing(
    vanish: Callable[[Path], object], commit: str, tmp_path: Path
) -> None:
    root = tmp_path / "mount" / "run"
    with manager_in(root, f"checkpoint.commit={commit}") as manager:
        manager.save(1, STATE)
        manager.wait()  # for its events, too
        vanish(root)
        for step in (2, 3):
            with pytest.raises(CheckpointSaveError, match=f"{root} is no longer the folder .* start the run again"):
                manager.save(step, STATE)
        assert root.exists() == (vanish == replace) and not list(root.glob("*"))
        if vanish != shutil.rmtree:
            if vanish == replace:
                root.rmdir()
            root.with_name("moved").rename(root)
            manager.save(4, STATE)  # it is back
            assert manager.steps() == [1, 4]
    assert root.exists() == (vanish != shutil.rmtree)  # nothing made it again at the end


@COMMITS
def test_with_warn_training_goes_on_and_saves_again_once_it_is_back(
    commit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    usual = ("checkpoint.on_error=warn", f"checkpoint.commit={commit}")
    with manager_in(root, *usual, preset="async_persistent") as manager:
        manager.save(1, STATE)
        manager.wait()
        rename(root)
        manager.save(2, STATE)
        manager.wait()
        assert "it is not there" in caplog.text and "Mount it or move it back" in caplog.text
        assert not root.exists()
        (tmp_path / "moved").rename(root)
        manager.save(3, STATE)
        manager.wait()
        assert manager.steps() == [1, 3]
        assert [report.outcome for report in manager.reports] == ["committed", "failed", "committed"]


@COMMITS
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
@pytest.mark.parametrize("vanish", [rename, replace])
def test_a_folder_that_vanishes_in_the_middle_of_a_save_is_not_made_again(
    vanish: Callable[[Path], object], preset: str, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"

    class Vanishing(FileStorage):
        def make_folder(self, path: str) -> None:
            if "iter_0000002" in path and root.exists() and (root / OWNER).exists():
                vanish(root)  # after the owner file was looked at, before the first write
            super().make_folder(path)

    monkeypatch.setattr(locate, "storage_at", lambda _, **of: Vanishing(atomic_rename=of.get("atomic_rename", True)))
    with manager_in(root, f"checkpoint.commit={commit}", preset=preset) as manager:
        manager.save(1, STATE)
        manager.wait()
        with pytest.raises(CheckpointSaveError, match="is no longer the folder"):
            manager.save(2, STATE)
            manager.wait()
        assert not list(root.glob("iter_*"))
    assert not list(root.glob("[!.]*")) and (tmp_path / "moved" / "iter_0000001").exists()


def test_a_folder_that_vanished_before_the_first_save_is_not_made_again(tmp_path: Path) -> None:
    with manager_in(tmp_path / "run") as manager:
        rename(tmp_path / "run")
        with pytest.raises(CheckpointSaveError, match="it is not there"):
            manager.save(1, STATE)
        assert not (tmp_path / "run").exists()


def test_a_folder_of_an_earlier_run_below_the_mount_point_is_not_taken_for_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_in(tmp_path) as manager:
        manager.save(1, STATE)
        owned_by(tmp_path, os.getppid())
        device = FileStorage.device
        monkeypatch.setattr(FileStorage, "device", lambda fs, path: device(fs, path) + 1)
        with pytest.raises(CheckpointSaveError, match="it is on another device"):
            manager.save(2, STATE)


def test_the_same_folder_mounted_anew_with_another_number_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_in(tmp_path) as manager:
        manager.save(1, STATE)
        device = FileStorage.device
        monkeypatch.setattr(FileStorage, "device", lambda fs, path: device(fs, path) + 1)
        manager.save(2, STATE)
        assert manager.steps() == [1, 2]
