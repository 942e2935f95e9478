"""Room on the disk, and the right to write there: told early, in numbers, and on all ranks."""

from __future__ import annotations

import copy
import errno
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_threads import rank_threads
from ranks import run_ranks

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointConfigError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.coordination import Coordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.managing.run_context import RunContext
from ckpt_component.managing.write_access import WriteAccess
from ckpt_component.testing import Disk, Fault, SimulatedFiles, faults

SCRIPT = Path(__file__).parent / "scripts" / "policies.py"


def state() -> dict[str, Any]:
    return {"weight": torch.full((100_000,), 2.0), "note": "x" * 50_000}


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_without_room_nothing_is_written_and_the_numbers_are_told(
    preset: str, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    free = [300_000]

    def free_bytes(self: FileStorage, path: str) -> int:
        asked.append(path)
        return free[0]

    monkeypatch.setattr(FileStorage, "free_bytes", free_bytes)
    content = {"weight": state()["weight"]} if writer == "safetensors" else state()
    with build_checkpointer(preset, [f"checkpoint/writer={writer}"]) as checkpointer:
        with pytest.raises(
            CheckpointStorageFullError,
            match=r"needs 0\.\d\d MB, and 0\.30 MB are free there\. .*checkpoint\.keep\.last",
        ) as caught:
            futures = checkpointer.save(content, tmp_path / "new" / "one")
            if futures is not None:
                futures[1].result(30)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(tmp_path) == []  # not even the folder
        assert set(asked) == {str(tmp_path / "new")}
        free[0] = 10**9
        futures = checkpointer.save(content, tmp_path / "new" / "one")
        if futures is not None:
            futures[1].result(30)
    assert os.listdir(tmp_path / "new") == ["one"]


def test_what_is_said_to_be_needed_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    monkeypatch.setattr(
        "ckpt_component.saving.attempts.refuse_without_room", lambda fs, target, needed, margin: asked.append(needed)
    )
    for writer in ("dcp", "torch_save"):
        with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as checkpointer:
            checkpointer.save(state(), tmp_path / writer)
        written = sum(path.stat().st_size for path in (tmp_path / writer).iterdir())
        assert written * 0.98 < asked[-1] < written * 1.05


def test_a_margin_stays_free_and_null_looks_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStorage, "free_bytes", lambda self, path: 10_000_000)
    with (
        build_checkpointer("sync", ["checkpoint.min_free_bytes=9900000"]) as checkpointer,
        pytest.raises(CheckpointStorageFullError, match=r"9\.90 MB are to stay free \(checkpoint\.min_free_bytes\)"),
    ):
        checkpointer.save(state(), tmp_path / "one")

    def never(self: FileStorage, path: str) -> int:
        raise AssertionError("asked")

    monkeypatch.setattr(FileStorage, "free_bytes", never)
    with build_checkpointer("sync", ["checkpoint.min_free_bytes=null"]) as checkpointer:
        checkpointer.save(state(), tmp_path / "one")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "make_folder", "write_new", "rename_new"])
def test_a_disk_that_fills_up_meanwhile_is_the_same_error_with_numbers(
    operation: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FileStorage, *arguments: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with build_checkpointer("sync") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(FileStorage, operation, full)
            with pytest.raises(CheckpointStorageFullError, match=r"It needs .*, and .* are free there now") as caught:
                checkpointer.save(state(), tmp_path / "one")
        assert caught.value.errno == code
        assert ("quota" in str(caught.value)) == (code == errno.EDQUOT)
        assert isinstance(caught.value.__cause__, OSError)
        checkpointer.save(state(), tmp_path / "two")
    left = [name for name in os.listdir(tmp_path) if operation != "rename_new" or not name.startswith(".ckpt-")]
    assert left == ["two"]


def test_a_file_that_grows_too_large_in_the_writer_process(tmp_path: Path) -> None:
    with build_checkpointer("async_persistent") as checkpointer:
        assert isinstance(checkpointer, AsyncCheckpointer)
        (pid,) = faults.writers()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        _, saved = checkpointer.save(state(), tmp_path / "one")
        with pytest.raises(
            CheckpointStorageFullError, match=r"File too large.*It needs .*checkpoint\.writer\.workers"
        ) as e:
            saved.result(30)
        assert e.value.errno == errno.EFBIG and "Traceback" in str(e.value.__cause__)
        assert psutil.pid_exists(pid)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_folder_that_cannot_be_written_to_is_refused_when_the_manager_is_built(preset: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            CheckpointConfigError, match=rf"checkpoint\.dir={folder} is a file, or lies below one\. Name"
        ):
            build_manager(preset, dir=folder)
    # no process is left: see conftest


def test_who_only_restores_needs_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build_manager("sync", dir=tmp_path / "run") as manager:
        manager.save(1, {"step": 1})
    assert not [name for name in os.listdir(tmp_path / "run") if "trial" in name]

    def read_only(self: FileStorage, *arguments: Any, **more: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("create", "make_folder", "try_folder"):
        monkeypatch.setattr(FileStorage, name, read_only)
    with pytest.raises(CheckpointConfigError, match="Read-only file system"):
        build_manager("sync", dir=tmp_path / "run")
    only_restores = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]
    with build_manager("sync", only_restores, dir=tmp_path / "run") as manager:
        target = {"step": 0}
        assert manager.restore(target) == 1 and target["step"] == 1
        with pytest.raises(CheckpointSaveError, match="Read-only file system"):
            manager.save(2, {"step": 2})


def test_a_disk_that_is_full_at_the_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"step": 1})

    def full(self: FileStorage, *arguments: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "create", full)
        manager = build_manager("sync", ["checkpoint.save.at_end=false"], dir=tmp_path)
    # What a dead run left may be what fills it; restoring deletes that, and then saves work.
    with manager:
        assert f"{tmp_path} is full" in caplog.text
        assert manager.restore({"step": 0}) == 1
        assert manager.save(2, {"step": 2})


@pytest.mark.parametrize("number", [2, 3], ids=["made", "made durable"])
def test_a_folder_that_a_full_disk_had_no_room_for_is_made_by_the_first_save(number: int) -> None:
    """It was never there, so the save does not report it as missing."""
    disk = Disk()
    files = SimulatedFiles(disk, {number: Fault("fail", errno.ENOSPC)})
    with build_manager("sync", ["checkpoint.writer.workers=1"], dir="/run", storage_of=lambda _: files) as manager:
        assert files.is_folder("/run") == (number == 3)
        assert manager.save(1, {"step": 1}) and manager.steps() == [1]
        for seed in range(4):
            with files.at_disk():  # the event file is still written to
                after = copy.deepcopy(disk)
            after.cut_power(seed)
            assert scan_steps(SimulatedFiles(after), "/run", MEGATRON).committed == [1]


@pytest.mark.slow
def test_a_folder_that_one_rank_cannot_write_to_is_refused_on_all(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "root_not_writable", 2, tmp_path)


def on_two_ranks(folders: Sequence[Path], remote: Path | None, timeouts: ResolvedTimeouts) -> list[Any]:
    """What two ranks, each with a folder, come to before the first step; `remote` is the one behind a local folder."""

    def check(ranks: Coordinator) -> None:
        far = None if remote is None else RunContext(FileStorage(), str(remote), MEGATRON, ranks, timeouts)
        run = RunContext(FileStorage(), str(folders[ranks.rank]), MEGATRON, ranks, timeouts, remote=far)
        WriteAccess(run, FencingToken(run.fs, run.root), takeover=False).check()

    with rank_threads(2) as on_all:
        return on_all(check)


@pytest.mark.parametrize(
    ("remote", "text"),
    [
        (True, "checkpoint.local.dir=.*/1 is another folder than that of rank 0. All ranks must share it"),
        (False, "checkpoint.dir=.*/1, which another rank made, cannot be seen from here after 0.1 s"),
    ],
)
def test_a_folder_that_ranks_do_not_share_is_refused_on_all(remote: bool, text: str, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    found = on_two_ranks(folders, tmp_path / "far" if remote else None, ResolvedTimeouts(visible=0.1))
    assert all(isinstance(error, CheckpointConfigError) for error in found), found
    assert all(re.match(f"On rank 1: {text}", str(error)) for error in found), found
    assert os.listdir(folders[0]) == []


def test_a_local_disk_that_is_full_at_the_start_is_a_warning_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: FileStorage, path: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileStorage, "create", full)
    # A rank may wait for the folder longer than for other ranks.
    timeouts = ResolvedTimeouts(stage=1.0, visible=60.0)
    assert on_two_ranks([tmp_path / "fast"] * 2, tmp_path / "far", timeouts) == [None, None]
    assert caplog.text.count("whether all ranks share it is not checked: ") == 1


@pytest.mark.slow
def test_two_ranks_need_what_they_write_together(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "no_room", 2, tmp_path)
