"""What a manager says of itself in a notebook, and at the end of a run."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outsides import SetTime
from ranks import run_ranks

from ckpt_component import CheckpointManager, build_manager
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.outside import OUTSIDE, Outside
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import SaveReport
from ckpt_component.managing.run_context import RunContext
from ckpt_component.managing.summary import contents_text, saves_text

STATE: dict[str, Any] = {"weight": torch.ones(100)}


def manager_in(root: Path | str, *overrides: str, preset: str = "async_persistent") -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false"]
    return build_manager(preset, [*usual, *overrides], dir=root)


def closing_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if (text := record.getMessage()).startswith("saved ")]


# --- repr -----------------------------------------------------------------------------------------------------------


def test_repr_says_what_the_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with manager_in("checkpoints", "checkpoint.keep.last=2") as manager:
        assert repr(manager) == "<CheckpointManager: no checkpoint in checkpoints, async_persistent>"
        for step in (100, 200, 300):
            manager.save(step, STATE)
    (tmp_path / "checkpoints" / "iter_0000400").mkdir()  # no checkpoint
    for path, age in (("iter_0000200", 10**6), ("iter_0000300", 125)):
        manifest = tmp_path / "checkpoints" / path / "manifest.json"
        os.utime(manifest, (manifest.stat().st_mtime - age,) * 2)
    text = repr(manager)
    assert text == (
        "<CheckpointManager: 2 checkpoints in checkpoints, newest 300 (2 min ago), async_persistent, closed>"
    )
    monkeypatch.chdir(tmp_path / "checkpoints" / "iter_0000300")
    assert f" in {tmp_path}/checkpoints, newest" in repr(manager)


def test_repr_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(build_manager("off", dir=tmp_path)) == "<CheckpointManager: off>"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with manager_in(tmp_path / "run", preset="sync") as manager:
        gone.rmdir()
        assert repr(manager) == f"<CheckpointManager: no checkpoint in {tmp_path}/run, sync>"
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "run").write_text("")
        assert repr(manager).startswith(f"<CheckpointManager: {tmp_path}/run cannot be listed ([Errno 20] Not a dir")
        (tmp_path / "run").unlink()
        (tmp_path / "away").rename(tmp_path / "run")
    monkeypatch.chdir(tmp_path)


def said_of_a_bucket(*reports: SaveReport, outside: Outside = OUTSIDE) -> str:
    run = RunContext(FileStorage(), "s3://bucket/run", MEGATRON, LocalCoordinator(outside), ResolvedTimeouts())
    return contents_text(run, reports)


def test_of_a_bucket_repr_says_what_this_run_saved_and_asks_nobody() -> None:
    now, said = time.time(), said_of_a_bucket
    failed = SaveReport("s3://bucket/run/iter_0000009", "failed", 9, time=now)
    first = SaveReport("s3://bucket/run/iter_0000000", step=0, time=now - 7300, committed_s=10)
    second = SaveReport("s3://bucket/run/iter_0000003", step=3, time=now - 100, committed_s=40)
    assert said(failed) == "nothing saved to s3://bucket/run yet"
    assert said(failed, first) == "1 checkpoint saved to s3://bucket/run, newest 0 (2 h ago)"
    assert said(first, second, failed) == "2 checkpoints saved to s3://bucket/run, newest 3 (60 s ago)"


@pytest.mark.parametrize(
    ("age", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_799, "48 h"), (172_800, "2 d")]
)
def test_repr_says_how_old_the_newest_is(age: int, text: str) -> None:
    report = SaveReport("", step=3, time=10.0**9 - age)
    assert f"newest 3 ({text} ago)" in said_of_a_bucket(report, outside=SetTime(10.0**9))


# --- the closing line -----------------------------------------------------------------------------------------------


def test_a_run_that_saved_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "ckpt_component")
    with manager_in("a run", "checkpoint.on_error=warn") as manager:
        for step in (1, 2):
            manager.save(step, STATE)
        manager.save(3, {"weight": torch.ones(3).to_sparse()})
    (line,) = closing_lines(caplog)
    lost, waits, size = (
        sum(getattr(report, each) for report in manager.reports) for each in ("lost_s", "stall_s", "bytes")
    )
    assert line == (
        f"saved 2 checkpoints (1 failed or skipped): {size} bytes, {lost:.2f} s of training time lost (waits {waits:.2f} s, "
        f"slower steps {lost - waits:.2f} s); ckpt report 'a run' shows more"
    )
    assert caplog.records[-1].getMessage() == line
    manager.close()
    assert len(closing_lines(caplog)) == 1


def test_the_line_says_what_was_not_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    with manager_in(tmp_path, "checkpoint.reuse.frozen=[base]", preset="sync") as manager:
        for step in (1, 2):
            manager.save(step, {"base": torch.ones(50_000), "step": step})
    (line,) = closing_lines(caplog)
    assert 200_000 < manager.reports[1].reused < 250_000 and " MB written and 0.20 MB reused, " in line


def test_there_is_no_line_where_nothing_was_saved_and_no_report_without_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    with manager_in(tmp_path) as manager:
        manager.restore(STATE)
    assert closing_lines(caplog) == []
    with manager_in(tmp_path, "checkpoint.events=false", preset="sync") as manager:
        manager.save(1, STATE)
    (line,) = closing_lines(caplog)
    assert line.startswith("saved 1 checkpoint: ") and " of training time lost (waits " in line and line.endswith(" s)")


@pytest.mark.parametrize(
    ("durable", "failed", "memory", "text"),
    [
        (2, 0, 0, "saved 2 checkpoints: 20 bytes, 2.00 s"),
        (2, 1, 3, "saved 2 checkpoints (1 failed or skipped): 20 bytes, kept 3 snapshots in memory, 6.00 s"),
        (0, 0, 1, "kept 1 snapshot in memory, 1.00 s"),
        (0, 2, 1, "saved 0 checkpoints (2 failed or skipped): 0 bytes, kept 1 snapshot in memory, 3.00 s"),
    ],
)
def test_the_line_counts_snapshots_in_memory_apart(durable: int, failed: int, memory: int, text: str) -> None:
    run = RunContext(FileStorage(), "/runs/one", MEGATRON, LocalCoordinator(), ResolvedTimeouts())
    kept = SaveReport("host://runs/one@1f-0a/iter_3", memory=True, bytes=10, stall_s=1.0, lost_s=1.0)
    saved = SaveReport("/runs/one/iter_4", bytes=10, stall_s=1.0, lost_s=1.0)
    missing = SaveReport("/runs/one/iter_4", "failed", stall_s=1.0, lost_s=1.0)
    line = saves_text(run, [kept] * memory + [saved] * durable + [missing] * failed)
    assert line is not None and line.startswith(f"{text} of training time lost")
    lost = SaveReport(kept.path, "failed", memory=True)
    assert "kept 1 snapshot in memory (1 failed or skipped), " in str(saves_text(run, [kept, lost]))
    assert saves_text(run, [lost, missing]) is None


def test_of_a_bucket_snapshots_in_memory_are_no_checkpoints() -> None:
    kept = SaveReport("host://bucket/run@1f-0a/iter_0000003", step=3, memory=True, time=time.time())
    assert said_of_a_bucket(kept) == "nothing saved to s3://bucket/run yet"


@pytest.mark.slow
def test_of_two_ranks_one_says_it(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "step_order.py", "closing", 2, tmp_path)
