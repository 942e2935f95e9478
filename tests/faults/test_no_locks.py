"""File systems without locks. Saves, restores and clean-up work; who touches a file beside an attempt lives."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest
from faults.invariants import MANIFEST_MODE, age, blank_state, differences, state_of
from faults.test_kill_points import enumerate_kills
from forker import Forker
from strides import in_turn

from ckpt_component import CheckpointManager, build_manager
from ckpt_component.core.commit import commit, liveness
from ckpt_component.core.commit.cleanup import Unfinished
from ckpt_component.core.commit.liveness import QUIET_SECONDS, AttemptLock
from ckpt_component.core.commit.names import ALIVE_PREFIX, MEGATRON
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage
from ckpt_component.core.storage.new_names import new_token

pytestmark = pytest.mark.slow

NO_LOCKS = "flock:action=raise:ENOLCK"
COMMITS = pytest.mark.parametrize("mode", [MANIFEST_MODE, "checkpoint.commit=rename"])


class NoLocks(FileStorage):
    def flock(self, fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.fixture
def without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in the writer processes that it starts."""
    monkeypatch.setenv(FAILPOINT, NO_LOCKS)
    monkeypatch.setenv(FAILPOINT_LOG, str(tmp_path / "ops"))


def begun(fs: FileStorage, root: Path, step: int) -> Attempt:
    attempt = commit.new_attempt(fs, str(root / MEGATRON.folder(step)), new_token())
    commit.begin(attempt)
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    return attempt


def marks(root: Path) -> list[Path]:
    return list(root.glob(f"{ALIVE_PREFIX}*"))


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    usual = ["checkpoint.save.at_end=false", "checkpoint.timeouts.close=0.2"]
    return build_manager(preset, [*usual, *overrides], dir=root)


@pytest.mark.parametrize(("code", "sticky"), in_turn(product(["ENOLCK", "ENOSYS", "EOPNOTSUPP"], [False, True]), 3))
@pytest.mark.parametrize(("preset", "overrides"), [("async_persistent", [])])
def test_no_lock_operation_of_a_save_needs_locks(
    preset: str, overrides: list[str], code: str, sticky: bool, forker: Forker, tmp_path: Path
) -> None:
    found = forker.run(
        "faults.scenarios:fail_everywhere",
        root=str(tmp_path / "root"),
        preset=preset,
        operation="flock",
        code=code,
        sticky=sticky,
        logs=str(tmp_path),
        overrides=overrides,
    )
    assert found["wrong"] == [] and found["aborted"] == 0 and found["survived"] > 0


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "victim", "overrides", "stride"),
    [
        ("sync", "self", [], 23),
        ("async_persistent", "other", [], 21),
        ("async_persistent", "all", [MANIFEST_MODE], 23),
    ],
)
def test_kills_without_locks(
    preset: str, victim: str, overrides: list[str], stride: int, forker: Forker, tmp_path: Path
) -> None:
    kills, wrong = enumerate_kills(forker, tmp_path, preset, victim, overrides, stride, always=NO_LOCKS)
    print(f"{preset}, {victim}: {kills} kills, {len(wrong)} violations")
    assert not wrong, "\n".join(wrong)
    assert kills > 1


@COMMITS
@pytest.mark.usefixtures("without_locks")
def test_what_a_dead_run_left_goes_and_one_warning_says_why(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    dead = begun(NoLocks(atomic_rename=mode != MANIFEST_MODE), root, 7)
    left = AttemptLock(NoLocks(), dead)
    [mark] = marks(root)
    left.close()
    mark.touch()  # as if it were killed: its file stays, and is touched no more
    age(str(root))
    caplog.clear()
    with manager_in(root, mode, preset="async_persistent") as manager:
        assert manager.restore(blank_state()) is None
        assert not os.path.exists(dead.staging) and not marks(root)
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait()
    told = [record for record in caplog.records if "no file locks" in record.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.WARNING
    target = blank_state()
    with manager_in(root, mode) as manager:
        assert manager.restore(target) == 2 and differences(target, state_of(2)) == []
    assert not marks(root)


@COMMITS
@pytest.mark.usefixtures("without_locks")
def test_who_lives_is_waited_for_and_not_deleted(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    attempt = begun(NoLocks(atomic_rename=mode != MANIFEST_MODE), root, 7)
    lock = AttemptLock(NoLocks(), attempt)
    os.utime(attempt.staging, (1, 1))
    os.utime(os.path.join(attempt.staging, "data"), (1, 1))
    try:
        with manager_in(root, mode) as manager:
            assert manager.restore(blank_state()) is None
        assert "is still being written by another process" in caplog.text
        assert os.path.exists(attempt.staging)
    finally:
        lock.close()
    assert not marks(root)


def test_who_has_locks_sees_who_has_none(tmp_path: Path) -> None:
    attempt = begun(NoLocks(), tmp_path, 7)
    lock = AttemptLock(NoLocks(), attempt)
    age(str(tmp_path))
    (mark,) = marks(tmp_path)
    os.utime(mark)
    assert Unfinished(FileStorage(), str(tmp_path), MEGATRON).living() == [os.path.basename(attempt.staging)]
    assert Unfinished(FileStorage(), str(tmp_path), MEGATRON).sweep() == []
    lock.close()
    assert Unfinished(FileStorage(), str(tmp_path), MEGATRON).sweep() == [os.path.basename(attempt.staging)]


def test_a_process_that_was_killed_here_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(NoLocks(), tmp_path, 7)
    own = AttemptLock(NoLocks(), attempt)
    process = subprocess.Popen(["true"])
    process.wait()
    (mark,) = marks(tmp_path)
    ended = mark.with_name(mark.name.replace(f"-{os.getpid()}-", f"-{process.pid}-"))
    ended.touch()
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).living()  # another process works on it
    own.close()
    name = os.path.basename(attempt.staging)
    # Of another container, or of before a boot, it would not be seen.
    foreign = ended.rename(ended.with_name(re.sub(r"[0-9a-f]{8}(-\d+-)", r"0a1b2c3d\1", ended.name)))
    assert foreign != ended and Unfinished(NoLocks(), str(tmp_path), MEGATRON).living() == [name]
    foreign.rename(ended)
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).living() == []
    assert (
        Unfinished(NoLocks(), str(tmp_path), MEGATRON).sweep() == []
    )  # the folder is young, and its mark stays with it
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).living() == []
    os.utime(attempt.staging, (1, 1))
    monkeypatch.setattr(liveness, "_YOUNG_SECONDS", 0.0)
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).sweep() == [name, ended.name]
    assert not marks(tmp_path)


def test_the_file_is_touched_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "TOUCH_SECONDS", 0.01)
    lock = AttemptLock(NoLocks(), begun(NoLocks(), tmp_path, 7))
    (mark,) = marks(tmp_path)
    for _ in range(2):
        os.utime(mark, (1, 1))
        deadline = time.monotonic() + 20
        while mark.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    lock.close()
    assert not marks(tmp_path)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_the_clock_is_that_of_the_file_system(ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, alive = begun(NoLocks(), tmp_path, 7), begun(NoLocks(), tmp_path, 8)
    past = time.time() - QUIET_SECONDS - 5
    for path in (os.path.join(dead.staging, "data"), dead.staging):
        os.utime(path, (past, past))
    os.utime(alive.staging, (past, past))  # and `data` in it is new
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).living() == [os.path.basename(alive.staging)]
    assert Unfinished(NoLocks(), str(tmp_path), MEGATRON).sweep() == [os.path.basename(dead.staging)]
    assert os.listdir(tmp_path) == [os.path.basename(alive.staging)]


def test_a_folder_that_is_committed_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    class Committed(FileStorage):
        def open_folder(self, path: str) -> int:
            os.rename(path, tmp_path / "iter_0000007")
            return super().open_folder(path)

    for look in (Unfinished.living, Unfinished.sweep):
        attempt = begun(FileStorage(), tmp_path, 7)
        age(str(tmp_path))
        assert look(Unfinished(Committed(), str(tmp_path), MEGATRON)) == []
        os.unlink(tmp_path / "iter_0000007" / "data")
        os.rmdir(tmp_path / "iter_0000007")
        assert not os.path.exists(attempt.staging)
