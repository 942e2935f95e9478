"""The first save of a run that has restored nothing settles what becomes of the steps that are there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import no_renames

from ckpt_component import CheckpointExistsError, CheckpointManager, CheckpointSaveError, build_manager
from ckpt_component.core.commit.names import QUARANTINE_PREFIX
from ckpt_component.core.storage.files import FileStorage

STATE = {"weight": torch.ones(10)}
ANEW = ("checkpoint.resume=never", "checkpoint.rewind=true")


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=null"]
    return build_manager("sync", [*usual, *overrides], dir=root)


def saved(root: Path, *steps: int) -> None:
    with manager_in(root) as manager:
        for step in steps:
            manager.save(step, STATE)


def retired(root: Path) -> list[str]:
    return sorted(path.name.split(".")[2] for path in root.glob(f"{QUARANTINE_PREFIX}*"))


def test_never_with_rewind_retires_all_that_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    with manager_in(tmp_path, *ANEW) as manager:
        assert manager.save(3, STATE)
        assert manager.save(5, STATE)
        assert manager.steps() == [3, 5]
    assert retired(tmp_path) == ["iter_0000001", "iter_0000005"]


def test_never_without_rewind_is_refused_beside_others(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    with manager_in(tmp_path, ANEW[0]) as manager:
        with pytest.raises(CheckpointExistsError, match="resume=never, and .* holds checkpoints of steps 1, 5"):
            manager.save(7, STATE)
        assert manager.steps() == [1, 5]


def test_what_cannot_be_retired_is_an_error_and_nothing_is_saved(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)

    with manager_in(tmp_path, *ANEW) as manager:
        with no_renames(), pytest.raises(CheckpointSaveError, match=r"could not retire 1, 5 .*Read-only") as caught:
            manager.save(7, STATE)
        assert caught.value.errno == errno.EROFS and manager.steps() == [1, 5]
        assert manager.save(7, STATE)
        assert manager.steps() == [7]


def test_a_folder_that_cannot_be_listed_is_an_error_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 5)
    names = FileStorage.names

    def fail(self: FileStorage, path: str, *rest: Any) -> list[str]:
        if path == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return names(self, path, *rest)

    with manager_in(tmp_path) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(FileStorage, "names", fail)
            with pytest.raises(CheckpointSaveError, match="cannot be listed: .*Input/output error") as caught:
                manager.save(3, STATE)
        assert caught.value.errno == errno.EIO
        with pytest.raises(CheckpointExistsError, match="Step 3 is the first that this run saves, .* step 5"):
            manager.save(3, STATE)
        assert manager.steps() == [1, 5]
