"""What a client of NFS does: it keeps deleted files that are open, closes them late, and knows old names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_component import CheckpointFencedError, build_checkpointer, build_manager
from ckpt_component.core import libc
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import discard
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.storage import locate, tree_removal
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.errors import CheckpointExistsError, CheckpointSaveError


class NfsClient(FileStorage):
    """Files called `manifest.json` are open; `.nfs` files cannot be deleted, and are closed at the n-th trial."""

    closes_at = 3

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
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
            super().unlink(path, dir_fd=dir_fd)


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
    monkeypatch.setattr(tree_removal, "_CLOSE_SECONDS", 0.05)
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
    monkeypatch.setattr(libc, "renameat2", None)
    attempt = commit.new_attempt(fs, str(target), new_token())
    commit.begin(attempt)
    exists: Callable[[str], bool] = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: path != str(target) and exists(path))
    target.mkdir()
    (target / "theirs").touch()
    monkeypatch.setattr(FileStorage, "is_real_folder", lambda *_: False)
    with pytest.raises(CheckpointExistsError, match="taken by another save"):
        commit.publish(attempt, [], {}, {})
    assert os.listdir(target) == ["theirs"]


class Cache:
    """Names as a client knows them: opened are the files of before, until their folder is opened."""

    def __init__(self) -> None:
        self.before: dict[str, str] = {}
        #: How many openings of the folder it takes; until then opening one of them fails.
        self.stale = 0
        self._open: Callable[..., int] = os.open

    def open(self, path: str, flags: int, *rest: int, **where: int) -> int:
        if flags & os.O_DIRECTORY and self.before and os.path.dirname(next(iter(self.before))) == path:
            self.stale = max(self.stale - 1, 0)
            if not self.stale:
                self.before.clear()
        elif path in self.before and self.stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return self._open(self.before.get(path, path), flags, *rest, **where)


def save_while_replaced(root: Path, monkeypatch: pytest.MonkeyPatch, stale: int) -> None:
    """Save as a run that another client replaces after it began, so that this one knows the owner file of before."""
    cache, state, usual = Cache(), {"weight": torch.ones(3)}, ["checkpoint.save.at_end=false"]
    owner, backup = str(root / ".ckpt-owner.json"), str(root / "backup")

    class Replaced(FileStorage):
        def write_new(self, path: str, data: bytes) -> None:
            if path.endswith("integrity-0.json") and "iter_0000002" in path:
                os.link(owner, backup)  # as `cp -al` does: the server keeps the file that is replaced
                FencingToken(FileStorage(), str(root)).acquire()
                cache.before[owner], cache.stale = backup, stale
                monkeypatch.setattr(os, "open", cache.open)
            super().write_new(path, data)

    monkeypatch.setattr(locate, "storage_at", lambda *_, **__: Replaced())
    with build_manager("sync", usual, dir=root) as manager:
        manager.save(1, state)
        manager.save(2, state)


@pytest.mark.parametrize("stale", [0, 3])
def test_a_run_is_fenced_although_its_client_knows_the_owner_of_before(
    stale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointFencedError, match="took over"):
        save_while_replaced(tmp_path, monkeypatch, stale)
    assert not (tmp_path / "iter_0000002").exists()


def test_an_owner_file_that_stays_stale_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointSaveError, match=os.strerror(errno.ESTALE)):
        save_while_replaced(tmp_path, monkeypatch, stale=10**9)
    assert not (tmp_path / "iter_0000002").exists()
