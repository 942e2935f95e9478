"""What follows a commit holds nobody up, and says what it has to say once."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import tidied
from outsides import Ending

from ckpt_component import CheckpointManager, CheckpointStepError, build_manager
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage

POINTER = "latest_checkpointed_iteration.txt"


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=1"]
    return build_manager("async_persistent", [*usual, *overrides], dir=root)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checkpoints are deleted once this is set."""
    go, remove_tree = threading.Event(), FileStorage.remove_tree

    def remove_later(self: FileStorage, path: str) -> None:
        assert go.wait(60)
        remove_tree(self, path)

    monkeypatch.setattr(FileStorage, "remove_tree", remove_later)
    return go


def test_saves_are_over_before_old_checkpoints_are_deleted_and_close_waits_for_that(
    tmp_path: Path, held: threading.Event
) -> None:
    with manager_in(tmp_path) as manager:
        for step in (1, 2, 3):  # the third does not wait for what the second deletes
            manager.save(step, state_of(step))
        manager.wait()
        assert [report.outcome for report in manager.reports] == ["committed"] * 3
        assert (tmp_path / POINTER).read_text() == "3"
        assert any(tmp_path.glob("iter_0000001")) or any(tmp_path.glob(".ckpt-trash.*"))  # not deleted yet
        held.set()
    assert manager.steps() == [3] and not any(tmp_path.glob(".ckpt-trash.*"))


def test_close_waits_for_deletions_no_longer_than_its_timeout(
    tmp_path: Path, held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        with manager_in(tmp_path, "checkpoint.timeouts.close=0.5") as manager:
            for step in (1, 2):
                manager.save(step, state_of(step))
        assert "deleting old checkpoints took longer than 0.5 s (timeouts.close)" in caplog.text
    finally:
        held.set()
        tidied(manager)
    assert manager.steps() == [2]


def test_a_deletion_that_raises_is_logged_and_the_save_stays_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename_new = FileStorage.rename_new

    def fail_for_trash(self: FileStorage, source: str, target: str) -> None:
        if ".ckpt-trash." in target:
            raise ZeroDivisionError
        rename_new(self, source, target)

    monkeypatch.setattr(FileStorage, "rename_new", fail_for_trash)
    with manager_in(tmp_path) as manager:
        for step in (1, 2):
            assert manager.save(step, state_of(step))
    assert "step 2 is committed, but listing or deleting older checkpoints failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text and manager.steps() == [1, 2]


def test_what_is_no_checkpoint_is_warned_about_once_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000101").mkdir()
    (tmp_path / "iter_0000101" / "integrity-0.json").touch()
    caplog.set_level(logging.WARNING, "ckpt_component")
    for run in (1, 2):
        with manager_in(tmp_path) as manager:
            if run == 2:
                manager.restore(state_of(0))
            for step in (200 + 2 * run, 201 + 2 * run):
                manager.save(step, state_of(step))
                manager.wait()
            manager.steps()
        for name in ("iter_0000100", "iter_0000101") if run == 1 else ("iter_0000100",):
            assert len([record for record in caplog.records if name in record.getMessage()]) == 1, (run, name)
        caplog.clear()


@pytest.mark.parametrize("damage", ["a_file_is_gone", "a_file_is_cut", "its_manifest_is_cut"])
def test_one_that_is_damaged_meanwhile_is_not_counted_among_the_newest(damage: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.keep.last=2") as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        tidied(manager)  # the last one was examined
        file = tmp_path / "iter_0000003" / ("manifest.json" if damage == "its_manifest_is_cut" else "__0_0.distcp")
        if damage == "a_file_is_gone":
            file.unlink()
        else:
            os.truncate(file, 10)
        manager.save(4, state_of(4))
    assert manager.steps() == [2, 4]


def test_one_that_could_not_be_read_for_a_while_is_read_once_more_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, read, reads = threading.Event(), FileStorage.read, list[str]()

    def fail_while_away(self: FileStorage, path: str, *args: Any, **kwargs: Any) -> bytes:
        if path.endswith("iter_0000001/manifest.json"):
            if away.is_set():
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            reads.append(path)
        return read(self, path, *args, **kwargs)

    monkeypatch.setattr(FileStorage, "read", fail_while_away)
    with manager_in(tmp_path, "checkpoint.keep.last=3") as manager:
        away.set()
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait()
        while "iter_0000001/manifest.json cannot be read" not in caplog.text:
            time.sleep(0.01)
        away.clear()
        for step in (3, 4):
            manager.save(step, state_of(step))
    assert len(reads) == 1 and manager.steps() == [2, 3, 4]


def test_a_save_that_finds_no_room_waits_for_the_deletions_after_the_last_one(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(fs: FileStorage, path: str) -> int:
        if held.is_set() or not (tmp_path / "iter_0000002").exists():
            return 1 << 40
        deadline = time.monotonic() + 30
        while not any(tmp_path.glob(".ckpt-trash.*")):  # the first step, which is deleted after the second
            assert time.monotonic() < deadline
            time.sleep(0.01)
        threading.Timer(0.1, held.set).start()
        return 0

    monkeypatch.setattr(FileStorage, "free_bytes", free_bytes)
    with manager_in(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            manager.wait()
            while step == 2 and not any(tmp_path.glob(".ckpt-trash.*")):
                time.sleep(0.01)  # the deletion has begun, and is held
    assert manager.steps() == [3] and [report.outcome for report in manager.reports] == ["committed"] * 3


def test_what_no_thread_takes_any_more_is_deleted_at_once(tmp_path: Path) -> None:
    """As from Python 3.12 on, when the interpreter exits."""
    outside = Ending("ckpt-purge", error="can't create new thread at interpreter shutdown")
    with build_manager("sync", ["checkpoint.keep.last=1"], dir=tmp_path, outside=outside) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait()
    assert manager.steps() == [2]


def test_a_step_whose_folder_was_there_before_counts_when_it_is_committed(tmp_path: Path) -> None:
    """Where checkpoints are not renamed, an attempt of another host may have left it."""
    usual = ["checkpoint.commit=manifest", "checkpoint.keep.last=1"]
    with build_manager("sync", usual, dir=tmp_path) as manager:
        manager.save(1, state_of(1))
    left = tmp_path / "iter_0000002" / "0badc0de-12345678"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").touch()
    with build_manager("sync", usual, dir=tmp_path) as manager:
        assert manager.restore(state_of(0)) == 1
        assert manager.save(2, state_of(2))
    assert manager.steps() == [2]


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """How often a manifest was read, and a file of a step looked at, since the last call."""
    log, seen = str(tmp_path / "ops"), [0]
    monkeypatch.setenv(FAILPOINT_LOG, log)
    monkeypatch.setenv(FAILPOINT, "read:path=manifest.json:action=sleep:0;size:path=/iter_:action=sleep:0")

    def count() -> Counter[str]:
        entries = read_log(f"{log}.fired")[seen[0] :]
        seen[0] += len(entries)
        return Counter(entry.operation for entry in entries)

    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep",
    [
        ["checkpoint.keep.last=null"],
        ["checkpoint.keep.last=2", "checkpoint.keep.every_steps=2"],
        ["checkpoint.keep.last=2", "checkpoint.keep.every_steps=2", "checkpoint.keep.best.metric=loss"],
    ],
    ids=["all", "some_forever", "the_best"],
)
def test_what_a_save_looks_at_does_not_grow_with_what_is_kept(
    keep: list[str], tmp_path: Path, looks: Callable[[], Counter[str]]
) -> None:
    root = tmp_path / "run"

    def looked_at(steps: Sequence[int], begins: str = "restore") -> Counter[str]:
        with manager_in(root, *keep) as manager:
            if begins == "restore":
                manager.restore(state_of(0))
            else:
                manager.begin_at(steps[0] - 1)
            looks()
            for step in steps:
                manager.save(step, state_of(step), metrics={"loss": 1 / (step + 1)})
        return looks()

    few = looked_at(range(1, 9))
    looked_at(range(9, 41))
    for first, begins in ((41, "restore"), (49, "begin_at")):
        many = looked_at(range(first, first + 8), begins)
        # A run looks once more at what it found when it began, and a deletion depends on.
        assert many["read"] - few["read"] <= 4 and many["size"] <= few["size"] + 20, (few, many)
    assert few["read"] == 8


# --- what dead runs have left ---------------------------------------------------------------------------------------


def _left_by_dead_runs(root: Path, *steps: int) -> Path:
    with manager_in(root, "checkpoint.keep.last=null") as manager:
        for step in steps:
            manager.save(step, state_of(step))
    return root


def _stepped(root: Path, *overrides: str) -> list[int]:
    """The steps that are left after a run that restored, made a step and saved none."""
    with manager_in(root, "checkpoint.save.every_steps=100", "checkpoint.keep.last=2", *overrides) as manager:
        step = manager.restore(state_of(0)) or 0
        assert manager.steps() == [1, 2, 3, 4]  # a script that evaluates restores too
        assert not manager.maybe_save(step + 1, state_of(step + 1))
    return manager.steps()


def test_what_dead_runs_left_is_deleted_after_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _left_by_dead_runs(tmp_path, 1, 2, 3, 4)
    caplog.set_level(logging.INFO, "ckpt_component")
    assert _stepped(tmp_path) == [3, 4]
    assert "deleting the checkpoint of step 1 (checkpoint.keep)" in caplog.text


@pytest.mark.slow
def test_close_waits_for_the_deletion_no_longer_than_its_timeout(
    tmp_path: Path, held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    _left_by_dead_runs(tmp_path, 1, 2, 3)
    with manager_in(tmp_path, "checkpoint.save.every_steps=100", "checkpoint.timeouts.close=0.5") as manager:
        step = manager.restore(state_of(0)) or 0
        manager.maybe_save(step + 1, state_of(step + 1))  # does not wait for it
    assert "deleting old checkpoints took longer than 0.5 s (timeouts.close)" in caplog.text
    held.set()
    tidied(manager)
    assert manager.steps() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.save.every_steps=null"],  # it never saves
        ["checkpoint.resume=never", "checkpoint.save.every_steps=null"],
        ["checkpoint.keep.last=null"],
        ["checkpoint.keep.every_steps=1"],
    ],
    ids=["restores_only", "never", "keeps_all", "keeps_each"],
)
def test_nothing_is_deleted_by_a_run_that(overrides: list[str], tmp_path: Path) -> None:
    assert _stepped(_left_by_dead_runs(tmp_path, 1, 2, 3, 4), *overrides) == [1, 2, 3, 4]


def test_nothing_is_deleted_while_another_run_may_be_alive(tmp_path: Path) -> None:
    path = _left_by_dead_runs(tmp_path, 1, 2, 3, 4) / ".ckpt-owner.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "token": "another", "host": "elsewhere", "released": False})
    )
    assert _stepped(tmp_path) == [1, 2, 3, 4]


def test_nothing_is_deleted_after_a_restore_from_elsewhere(tmp_path: Path) -> None:
    elsewhere = _left_by_dead_runs(tmp_path / "elsewhere", 7) / "iter_0000007"
    own = _left_by_dead_runs(tmp_path / "own", 1, 2, 3, 4)
    assert _stepped(own, f"checkpoint.resume={elsewhere}") == [1, 2, 3, 4]


def test_a_step_that_is_refused_deletes_nothing(tmp_path: Path) -> None:
    """It is a mistake of the program, which may have other values of `keep` than the run that made the folder."""
    with build_manager("sync", ["checkpoint.keep.last=10"], dir=tmp_path) as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(step, {"step": step})
    with build_manager("sync", ["checkpoint.keep.last=1"], dir=tmp_path) as manager:
        assert manager.restore({"step": 0}) == 5
        with pytest.raises(CheckpointStepError):
            manager.save(4, {"step": 4})
        assert not manager.save(5, {"step": 5})  # nor does one that is there already
        assert manager.steps() == [1, 2, 3, 4, 5]
    with build_manager("sync", ["checkpoint.save.every_steps=100"], dir=tmp_path) as manager:
        assert manager.steps() == [1, 2, 3, 4, 5]
