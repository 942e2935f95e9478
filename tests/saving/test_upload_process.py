"""The process of the uploads: what ends it, and how what it has begun goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from ckpt_component import CheckpointFencedError, build_manager
from ckpt_component.background import uploads
from ckpt_component.core.commit.names import STAGING_PREFIX
from ckpt_component.core.processes.start import start_in_background
from ckpt_component.managing.manager import CheckpointManager

STATE = {"value": torch.arange(1000.0)}
#: Of a checkpoint, which has some kB: less than a second, and longer than any test.
SLOW, ENDLESS = "upload.max_bytes_per_second=20000", "upload.max_bytes_per_second=1"


def manager_of(folder: Path, *overrides: str, local: str = "fast") -> CheckpointManager:
    """A manager with two tiers: a folder of this name, and `slow`."""
    usual = ["durability=process_crash", f"local.dir={folder / local}", *overrides]
    return build_manager("sync", [f"checkpoint.{each}" for each in usual], dir=folder / "slow")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def uploaders() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "upload_process" in " ".join(child.cmdline())]


def begun(folder: Path) -> list[Path]:
    """Uploads that are on their way."""
    return list((folder / "slow").glob(f"{STAGING_PREFIX}*/*"))


def restored(folder: Path) -> int | None:
    with manager_of(folder, "save.every_steps=null", "save.at_end=false") as manager:
        return manager.restore({"value": torch.zeros(1000)})


@pytest.mark.slow
def test_when_its_time_is_over_it_ends_and_the_next_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path, ENDLESS, "upload.finish_seconds=0.1") as manager:
        manager.save(7, STATE)
        until(lambda: begun(tmp_path))
        (process,) = uploaders()
        assert process.nice() > psutil.Process().nice()
        assert tuple(process.ionice()) == (psutil.IOPRIO_CLASS_BE, 7)
        group = Path(f"/proc/{process.pid}/autogroup")  # where there is one, nice counts only inside a session
        assert not group.exists() or group.read_text().endswith(f" nice {process.nice()}\n")
    assert not process.is_running()
    assert "slow is 7 steps behind step 7" in caplog.text and "the next run goes on with it" in caplog.text
    (staging,) = {path.parent for path in begun(tmp_path)}
    with manager_of(tmp_path) as manager:
        assert manager.restore({"value": torch.zeros(1000)}) == 7
    assert not staging.exists() and (tmp_path / "slow" / "iter_0000007").exists()


@pytest.mark.slow
def test_after_it_is_killed_the_next_save_starts_it_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_of(tmp_path, SLOW, "local.keep_last=2") as manager:
        manager.save(1, STATE)
        until(lambda: begun(tmp_path))
        (process,) = uploaders()
        process.kill()
        until(lambda: "ended with code -9; the next save starts it again" in caplog.text)
        assert not (tmp_path / "slow" / "iter_0000001").exists()
        manager.save(2, STATE)
    assert (tmp_path / "slow" / "iter_0000002").exists()


def test_an_error_of_the_process_itself_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = start_in_background
    missing = "ckpt_component.background.no_such_process"
    monkeypatch.setattr(uploads, "start_in_background", lambda module, *rest: start(missing, *rest))
    with manager_of(tmp_path) as manager:
        manager.save(1, STATE)
    assert "the process of the uploads: ModuleNotFoundError: No module named" in caplog.text
    assert "ended with code 1" in caplog.text


def test_a_run_that_has_ended_leaves_the_folder_to_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), manager_of(tmp_path, ENDLESS) as manager:
        manager.save(1, STATE)
        until(lambda: begun(tmp_path))
        (process,) = uploaders()
        raise KeyboardInterrupt
    assert process.is_running()  # it goes on by itself, and keeps no pipe of this process open
    outputs = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)}
    assert len(outputs) == 1 and outputs.isdisjoint(os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2))
    with manager_of(tmp_path) as manager:
        assert manager.restore({"value": torch.zeros(1000)}) == 1
        assert process.is_running()
        manager.save(2, STATE)
    until(lambda: "uploads have stopped: Another run took over" in caplog.text)
    until(lambda: not process.is_running())
    assert (tmp_path / "slow" / "iter_0000002").exists()


def test_a_run_that_takes_the_target_stops_the_uploads_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = tmp_path / "slow"
    with pytest.raises(CheckpointFencedError, match="Another run took over .*slow"), manager_of(tmp_path) as manager:
        manager.save(1, STATE)
        until((slow / "iter_0000001").exists)
        (process,) = uploaders()
        with manager_of(tmp_path, local="other") as another:
            another.restore({"value": torch.zeros(1000)})
            another.save(5, STATE)
        assert (slow / "iter_0000005").exists()
        manager.save(6, STATE)
        until(lambda: "uploads have stopped" in caplog.text)
        until(lambda: not process.is_running())
        manager.save(7, STATE)
    assert not (slow / "iter_0000006").exists() and (tmp_path / "fast" / "iter_0000006").exists()
