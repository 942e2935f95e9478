"""Two tiers: saves go to `checkpoint.local.dir`, and a process uploads them to `checkpoint.dir`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from inside import uploaded
from waiting import eventually

from ckpt_component import (
    CheckpointConfigError,
    CheckpointExistsError,
    CheckpointSaveError,
    CheckpointUnreadableError,
    build_manager,
)
from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.cli.app import main
from ckpt_component.core.commit.cleanup import BestPolicy, RetentionPolicy
from ckpt_component.core.commit.names import MEGATRON, OWNER
from ckpt_component.core.commit.scan import Scan
from ckpt_component.core.processes.start import start_in_background
from ckpt_component.events import read_events
from ckpt_component.managing.manager import CheckpointManager


def manager_of(folder: Path, *overrides: str) -> CheckpointManager:
    """A manager with two tiers, `fast` and `slow`."""
    usual = ["checkpoint.save.every_steps=1", "checkpoint.durability=process_crash", "checkpoint.local.keep_last=1"]
    local = f"checkpoint.local.dir={folder / 'fast'}"
    return build_manager("sync", [*usual, local, *(f"checkpoint.{each}" for each in overrides)], dir=folder / "slow")


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def restored(folder: Path, *overrides: str) -> tuple[int | None, Any, str | None]:
    """The step, the value and the path that a run begins with; it saves nothing."""
    state = {"value": torch.zeros(1)}
    with manager_of(folder, "save.every_steps=null", "save.at_end=false", *overrides) as manager:
        step = manager.restore(state)
    path = manager.restored_from
    return step, state["value"].item(), None if path is None else Path(path).parent.name


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    assert not left.value.code
    return capsys.readouterr().out


@pytest.mark.slow
def test_saves_are_uploaded_and_restored_from_the_nearest_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_component.cli.reports.page.can_plot", lambda: False)
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    with manager_of(tmp_path, "keep.last=2", "keep.best.metric=loss") as manager:
        assert manager.restore({"value": torch.zeros(1)}) is None
        for step, loss in losses.items():
            manager.save(step, {"value": torch.full((1,), float(step))}, metrics={"loss": loss})
            uploaded(manager)
    assert steps_in(fast) == [2, 4]  # the newest and the best
    assert steps_in(slow) == [2, 3, 4]
    assert (slow / MEGATRON.pointer).read_text() == "4"
    uploads = json.loads(ckpt(capsys, "report", str(fast), "--json"))["runs"][0]["uploads"]
    assert {each["step"] for each in uploads if each["bytes"] and each["seconds"]} >= {2, 4}
    assert f"uploads: {len(uploads)}, " in ckpt(capsys, "report", str(fast), "--out", str(tmp_path))
    steps = ", ".join(str(each["step"]) for each in reversed(uploads))
    assert f"uploaded: {steps}\n" in ckpt(capsys, "log", str(fast))
    assert restored(tmp_path) == (4, 4.0, "fast")
    newest = next((fast / "iter_0000004").glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[:-100] + bytes(100))
    assert restored(tmp_path) == (4, 4.0, "slow")
    assert steps_in(fast) == [2]  # the damaged one is quarantined
    shutil.rmtree(fast)
    state = {"value": torch.zeros(1)}
    with manager_of(tmp_path, "keep.last=2", "keep.best.metric=loss") as manager:
        assert manager.restore(state) == 4 and state["value"].item() == 4
        assert not manager.save(4, state)  # it is saved already, though not here
        assert manager.best_steps() == [2, 3, 4]
        manager.save(5, state)
        assert manager.steps()[-2:] == [4, 5]
        assert [Path(manager.path_of(step)).parent.name for step in (4, 5, 6)] == ["slow", "fast", "fast"]
    assert steps_in(fast) == [5] and steps_in(slow) == [2, 4, 5]


def test_going_back_retires_in_both_places(tmp_path: Path) -> None:
    state = {"value": torch.zeros(1)}
    with manager_of(tmp_path, "local.keep_last=2", "keep.last=null") as manager:
        for step in (1, 2):
            manager.save(step, state)
            uploaded(manager)
    with pytest.raises(CheckpointExistsError, match="step 2 would follow step 1"):
        restored(tmp_path, "resume=1", "save.at_end=true")
    with manager_of(tmp_path, "local.keep_last=2", "resume=1", "rewind=true") as manager:
        assert manager.restore(state) == 1
        manager.save(2, {"value": torch.full((1,), 7.0)})
    assert restored(tmp_path) == (2, 7.0, "fast")
    shutil.rmtree(tmp_path / "fast")
    assert restored(tmp_path) == (2, 7.0, "slow")
    assert len([*(tmp_path / "slow").glob(".ckpt-quarantine.*")]) == 1


@pytest.mark.slow
def test_a_dead_target_is_a_warning_with_the_lag_and_an_error_by_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, state = tmp_path / "slow", {"value": torch.ones(1)}
    slow.touch()  # a file cannot be listed as a folder
    with pytest.raises(CheckpointUnreadableError, match="may have one, but cannot be listed"):
        restored(tmp_path)  # a checkpoint may be there, from which to continue
    caplog.clear()
    with manager_of(tmp_path, "resume=never", "upload.finish_seconds=0.5") as manager:
        manager.restore(state)
        for step in range(1, 6):
            manager.save(step, state)
        manager.wait()
        assert manager.steps()[-1] == 5
        # A process that has not begun to upload when the run ends is not waited for as long as one that has.
        eventually(lambda: any(event["event"] == "upload" for event in read_events(tmp_path / "fast")), 60)
    assert caplog.text.count("cannot be listed; only") == 1
    assert restored(tmp_path, "resume=5")[0] == 5
    with pytest.raises(CheckpointUnreadableError, match="resume=9, and .* may have one, but cannot be listed"):
        restored(tmp_path, "resume=9")
    fast = str(tmp_path / "fast")
    assert ckpt(capsys, "log", fast).count("upload failed: [Errno 20] Not a directory") == 1
    behind = [record.message for record in caplog.records if "5 steps behind step 5" in record.message]
    assert behind and "bytes to upload" in behind[-1] and "Not a directory" in behind[-1]
    with (
        pytest.raises(CheckpointSaveError, match="1[0-9] steps behind .*max_lag_steps=4"),
        manager_of(tmp_path, "upload.max_lag_steps=4", "upload.on_lag=error", "upload.finish_seconds=0.1") as manager,
    ):
        assert manager.restore(state) == 5
        manager.save(15, state)
        manager.wait()
        manager.save(16, state)
    uploaders = [each for each in psutil.Process().children() if "upload_process" in " ".join(each.cmdline())]
    assert not psutil.wait_procs(uploaders, timeout=20)[1]
    slow.unlink()
    assert restored(tmp_path)[0] == 15
    with manager_of(tmp_path, "upload.every_steps=10") as manager:
        assert manager.restore(state) == 15
        manager.save(16, state)
        manager.save(17, state)
    assert steps_in(slow) == [17]  # the last one of a run, even if it is not due


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["checkpoint.upload.every_steps=5"], "checkpoint.upload.every_steps has no effect"),
        (["checkpoint.local.dir=s3://bucket/run"], "not a local folder"),
        (["checkpoint.local.dir=checkpoints"], "both checkpoints"),
        (
            ["checkpoint.dir=s3://bucket/run", "checkpoint.export.format=hf"],
            "name a local folder, checkpoint.export.dir",
        ),
    ],
)
def test_configs_that_contradict_themselves_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=text):
        build_manager("sync", overrides)


def scan_of(committed: list[int], run: str = "me", metrics: Mapping[int, float] | None = None) -> Scan:
    named = {step: {"loss": value} for step, value in (metrics or {}).items()}
    return Scan(
        committed,
        metrics={step: named.get(step, {}) for step in committed},
        manifests={step: {"run": run} for step in committed},
    )


def test_which_checkpoint_is_uploaded_next() -> None:
    def policy(**values: Any) -> UploadPolicy:
        return UploadPolicy("fast", "slow", MEGATRON, **{"keep": RetentionPolicy(last=2), "run": "me", **values})

    usual, tenth = policy(), policy(every_steps=10)
    assert usual.next_step(scan_of([1, 2, 3]), scan_of([]), ended=False) == 3
    assert usual.next_step(scan_of([1, 2, 3]), scan_of([3]), ended=False) is None  # 1 and 2 were skipped
    assert usual.next_step(scan_of([]), scan_of([3]), ended=True) is None
    assert tenth.next_step(scan_of([10, 19]), scan_of([]), ended=False) == 10
    assert tenth.next_step(scan_of([10, 19]), scan_of([10]), ended=False) is None
    assert tenth.next_step(scan_of([10, 19]), scan_of([]), ended=True) == 19
    forever = policy(keep=RetentionPolicy(last=2, every_steps=2))
    assert forever.next_step(scan_of([1, 2, 3]), scan_of([3]), ended=False) == 2
    best = policy(best=BestPolicy("loss"))
    local, remote = scan_of([1, 2, 3], metrics={1: 0.5, 2: 0.9, 3: 0.7}), scan_of([3], metrics={3: 0.7})
    assert best.next_step(local, remote, ended=False) == 1
    # Another run's later checkpoints: those of an earlier run are left alone, and those of this one would be lost.
    assert usual.next_step(scan_of([5], "older"), scan_of([9], "other"), ended=False) is None
    with pytest.raises(CheckpointExistsError, match="up to step 9 of another run"):
        usual.next_step(scan_of([5]), scan_of([9], "other"), ended=False)
    assert UploadPolicy.of(json.loads(json.dumps(asdict(best)))) == best


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("by_rename", [True, False])
def test_an_upload_that_is_killed_at_any_operation_is_completed_by_the_next(tmp_path: Path, by_rename: bool) -> None:
    with build_manager("sync", ["checkpoint.durability=process_crash"], dir=tmp_path / "fast") as manager:
        for step in (1, 2):
            manager.save(step, {"value": torch.rand(1000), "step": step})
    script = Path(__file__).parent / "scripts" / "killed_uploads.py"
    command = [sys.executable, str(script), str(tmp_path / "fast"), str(tmp_path / "slow"), str(int(by_rename))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    operations, continued = map(int, done.stdout.split())
    assert operations > 30 and continued > 10


def test_the_process_ends_in_time_although_the_owner_cannot_be_read(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path / "fast") as manager:
        manager.save(1, {"value": 1})
    (tmp_path / "slow").touch()  # every upload fails
    (tmp_path / "fast" / OWNER).unlink()
    (tmp_path / "fast" / OWNER).mkdir()
    policy = UploadPolicy(
        str(tmp_path / "fast"), str(tmp_path / "slow"), MEGATRON, RetentionPolicy(last=1), finish_seconds=0.5
    )
    process = start_in_background("ckpt_component.background.upload_process", asdict(policy))
    process.hang_up()
    try:
        messages = [*iter(lambda: process.receive(time.monotonic() + 60), None)]
        assert process.wait(60) == 0
    finally:
        process.end(0)
    assert any("failed" in header for header, _, _ in messages)


@pytest.mark.parametrize("local", ["link", "above/slow", "slow/", "link/iter_0000001", "above/slow/iter_0000001/fast"])
def test_a_local_folder_that_is_the_permanent_one_is_refused_however_it_is_spelled(tmp_path: Path, local: str) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "link").symlink_to("slow")
    (tmp_path / "above").symlink_to(".")
    for dir, overrides in ((tmp_path / "slow", []), (None, [f"checkpoint.dir={tmp_path}/slow"])):
        with pytest.raises(CheckpointConfigError, match="are one folder|are both|is in a checkpoint of checkpoint.dir"):
            build_manager("sync", [f"checkpoint.local.dir={tmp_path}/{local}", *overrides], dir=dir)
