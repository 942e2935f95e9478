"""A run's first save clears up after runs of other hosts, which own the folder no more; never what may be alive."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointFencedError, CheckpointManager, build_manager
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import quarantine
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.liveness import AttemptLock, is_locked
from ckpt_component.core.commit.names import ALIVE_PREFIX, MEGATRON, owned_token, trash_path
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.storage import locate
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token

COMMITS = pytest.mark.parametrize("mode", ["manifest", "rename"])
STATE = {"weight": torch.ones(3)}


class NoLocks(FileStorage):
    def flock(self, fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have this process run on the host of that name from now on."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


def manager_in(root: Path, mode: str) -> CheckpointManager:
    return build_manager("sync", [f"checkpoint.commit={mode}", "checkpoint.save.at_end=false"], dir=root)


def left_by(root: Path, step: int, mode: str, *, owned: bool = True) -> Attempt:
    """What a run that was killed in mid-save leaves."""
    fs = FileStorage(atomic_rename=mode == "rename")
    token = owned_token(new_token()) if owned else new_token()
    attempt = commit.new_attempt(fs, str(root / MEGATRON.folder(step)), token)
    commit.begin(attempt)
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    age(Path(attempt.staging))
    return attempt


def age(path: Path) -> None:
    for each in (*path.glob("*"), path):
        os.utime(each, (1, 1))


@COMMITS
def test_the_first_save_deletes_what_runs_of_other_hosts_left(
    mode: str, tmp_path: Path, on_host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    on_host("pod-1")
    with manager_in(tmp_path, mode) as manager:
        manager.save(1, STATE)
    dead = left_by(tmp_path, 2, mode)
    retired = Path(trash_path(str(tmp_path / "iter_0000000")))
    retired.mkdir()
    (retired / "data").touch()
    mark = tmp_path / f"{ALIVE_PREFIX}{dead.token}.{new_token()}"
    mark.touch()
    for path in (*tmp_path.glob("iter_*/*-*"), *tmp_path.glob("iter_*"), retired, mark):
        age(path)  # also a committed checkpoint
    on_host("pod-2")
    with manager_in(tmp_path, mode) as manager:
        assert manager.restore(dict(STATE)) == 1
        assert os.path.exists(dead.staging) and retired.exists()  # a run that only restores owns nothing
        manager.save(2, STATE)
        assert manager.steps() == [1, 2]
    assert not os.path.exists(dead.staging) and not retired.exists() and not mark.exists()
    assert not list(tmp_path.glob(".ckpt-t*"))
    assert f"deleted {tmp_path / os.path.relpath(dead.staging, tmp_path)}, which an earlier run left" in caplog.text


@COMMITS
def test_what_may_be_alive_is_left_until_it_is_not(mode: str, tmp_path: Path, on_host: Any) -> None:
    on_host("pod-1")
    young, locked = left_by(tmp_path, 11, mode), left_by(tmp_path, 12, mode)
    os.utime(os.path.join(young.staging, "data"))
    lock = AttemptLock(FileStorage(), locked)
    unowned = left_by(tmp_path, 13, mode, owned=False)  # of a checkpointer without a manager: it can commit
    on_host("pod-2")
    with manager_in(tmp_path, mode) as manager:
        manager.save(1, STATE)
        assert all(os.path.exists(each.staging) for each in (young, locked, unowned))
        on_host("pod-3")
        later = left_by(tmp_path, 15, mode)  # by a run that took the folder over since, for all that can be known
        on_host("pod-2")
        lock.close()
        age(Path(young.staging))
        manager.save(2, STATE)
        assert not os.path.exists(young.staging) and not os.path.exists(locked.staging)
        assert os.path.exists(unowned.staging) and os.path.exists(later.staging)
        assert manager.steps() == [1, 2]


def test_what_is_quarantined_stays(tmp_path: Path, on_host: Any) -> None:
    on_host("pod-1")
    fs = FileStorage(atomic_rename=False)
    kept = left_by(tmp_path, 3, "manifest")
    quarantine(fs, kept.target)
    age(Path(kept.staging))
    on_host("pod-2")
    FencingToken(fs, str(tmp_path)).acquire()
    assert os.path.exists(os.path.join(kept.staging, "data"))


@COMMITS
def test_a_run_whose_files_its_successor_deleted_learns_that_it_was_fenced(
    mode: str, tmp_path: Path, on_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for longer than anybody waits, on a host whose locks cannot be seen."""
    monkeypatch.setattr(locate, "storage_at", lambda _, **of: Frozen(atomic_rename=of["atomic_rename"]))

    class Frozen(NoLocks):
        def write_new(self, path: str, data: bytes) -> None:
            if path.endswith("integrity-0.json") and "iter_0000002" in path:
                for each in (*tmp_path.glob(".*"), *tmp_path.glob("iter_0000002/*"), tmp_path / "iter_0000002"):
                    if each.exists():
                        age(each)
                on_host("pod-2")
                with manager_in(tmp_path, mode) as new:
                    new.save(3, STATE)
                assert not os.path.exists(os.path.dirname(path))
            super().write_new(path, data)

    on_host("pod-1")
    with manager_in(tmp_path, mode) as old:
        old.save(1, STATE)
        with pytest.raises(CheckpointFencedError, match="took over"):
            old.save(2, STATE)
        assert old.steps() == [1, 3]
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".ckpt-owner.json", "events", "iter_0000001", "iter_0000003", MEGATRON.pointer]
    )


def test_a_lock_waits_for_who_looks_at_it(tmp_path: Path) -> None:
    """A script that restores looks for microseconds whether the folder of a save is locked."""
    attempt = left_by(tmp_path, 1, "rename")
    looks: list[int] = []

    class Looked(FileStorage):
        def flock(self, fd: int, how: int) -> None:
            looks.append(1)
            if len(looks) < 3:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().flock(fd, how)

    lock = AttemptLock(Looked(), attempt)
    assert len(looks) == 3 and is_locked(FileStorage(), attempt.staging)
    lock.close()
    assert not is_locked(FileStorage(), attempt.staging)
