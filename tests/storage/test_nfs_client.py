"""What a client of NFS does: it keeps deleted files that are open, closes them late, and knows old names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.errors import CheckpointExistsError, CheckpointFencedError
from ckpt_component.storage import commit, files, locate
from ckpt_component.storage.cleanup import discard
from ckpt_component.storage.files import FileStorage
from ckpt_component.storage.names import new_token


class NfsClient(FileStorage):
    """Files called `manifest.json` are open; `.nfs` files cannot be deleted, and are closed at the n-th trial."""

    closes_at = 3

    def unlink(self, path: str) -> None:
        folder, name = os.path.split(path)
        if name == "manifest.json":
            os.rename(path, os.path.join(folder, ".nfs0001"))
            self.trials = 0
        elif name.startswith(".nfs"):
            self.trials += 1
            if self.trials >= self.closes_at:
                os.unlink(path)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        else:
            super().unlink(path)


def test_a_file_that_is_closed_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "storage_at", lambda *_, **__: NfsClient())
    keeps = ["checkpoint.keep.last=1", "checkpoint.save.at_end=false"]
    with build_manager("sync", keeps, dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.ones(3)})
    assert [name for name in os.listdir(tmp_path) if name.startswith((".ckpt-trash", "iter_0000001"))] == []


def test_a_file_that_stays_open_keeps_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(NfsClient, "closes_at", 10**9)
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"weight": torch.ones(3)}, tmp_path / "one")
    assert not discard(NfsClient(), str(tmp_path / "one"))
    assert "could not be deleted" in caplog.text
    (trash,) = tmp_path.iterdir()
    assert os.listdir(trash) == [".nfs0001"]


def test_a_name_that_the_cache_does_not_know_is_taken_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `renameat2`, as on NFS, the check and the rename are two steps."""
    fs, target = FileStorage(), tmp_path / "one"
    monkeypatch.setattr(files, "rename_by", lambda *_: False)
    attempt = commit.new_attempt(fs, str(target), new_token())
    commit.begin(fs, attempt)
    exists: Callable[[str], bool] = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: path != str(target) and exists(path))
    target.mkdir()
    (target / "theirs").touch()
    monkeypatch.setattr(FileStorage, "is_real_folder", lambda *_: False)
    with pytest.raises(CheckpointExistsError, match="taken by another save"):
        commit.publish(fs, attempt, [], {}, {})
    assert os.listdir(target) == ["theirs"]


@pytest.mark.parametrize("times", [1, 3])
def test_a_run_that_another_host_replaced_is_told_although_its_client_has_the_old_file(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS 4.2 opens the replaced owner file by its cached handle, and says ESTALE when it is used."""
    options = ["checkpoint.save.at_end=false"]
    with build_manager("sync", options, dir=tmp_path) as ours, build_manager("sync", options, dir=tmp_path) as theirs:
        ours.save(1, {"weight": torch.ones(3)})
        theirs.save(2, {"weight": torch.ones(3)})
        opened: Callable[[str], int] = files.open_regular
        stale = dict.fromkeys([".ckpt-owner.json"], times)

        def open_stale(path: str) -> int:
            if stale.get(os.path.basename(path), 0):
                stale[os.path.basename(path)] -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return opened(path)

        monkeypatch.setattr(files, "open_regular", open_stale)
        with pytest.raises(CheckpointFencedError, match="took over"):
            ours.save(3, {"weight": torch.ones(3)})
        assert not any(stale.values()) and theirs.steps() == [1, 2]
