"""One failure fails one save: killed writers, failing writes, errors that surface once, dead trainers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outsides import Ending
from programs import run_program
from strides import in_turn

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    WorkerDiedError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.image.copy import CopyTasks
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG
from ckpt_component.events import SaveReport
from ckpt_component.saving.context import NoRun
from ckpt_component.saving.save_queue import InFlightSaves, SaveHandle
from ckpt_component.stagers.zero_overhead import BackgroundCopy
from ckpt_component.testing import faults


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value), "step": int(value)}


def build(*overrides: str, preset: str = "async_persistent") -> AsyncCheckpointer:
    checkpointer = build_checkpointer(preset, list(overrides))
    assert isinstance(checkpointer, AsyncCheckpointer)
    return checkpointer


def worker_of(checkpointer: AsyncCheckpointer) -> int:
    (pid,) = faults.writers()
    return pid


def test_a_write_error_in_the_worker_keeps_errno_and_leaves_nothing(tmp_path: Path) -> None:
    import resource

    with build() as checkpointer:
        pid = worker_of(checkpointer)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        _, write = checkpointer.save(state_of(1), tmp_path / "one")
        with pytest.raises(CheckpointSaveError, match="File too large") as caught:
            write.result(10)
        assert caught.value.errno == 27
        assert "Traceback" in str(caught.value.__cause__)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(state_of(2), tmp_path / "two")[1].result(30)
        assert worker_of(checkpointer) == pid
    assert sorted(os.listdir(tmp_path)) == ["two"]


def test_an_error_surfaces_once_and_does_not_wedge_later_saves(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with build() as checkpointer:
        _, write = checkpointer.save(state_of(1), blocked / "below")
        write.add_done_callback(lambda future: None)
        while not write.done():
            time.sleep(0.01)
        with pytest.raises(CheckpointSaveError):
            checkpointer.save(state_of(2), tmp_path / "two")
        checkpointer.save(state_of(3), tmp_path / "three")[1].result(30)


def test_an_error_that_was_seen_is_not_raised_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with build() as checkpointer:
        _, write = checkpointer.save(state_of(1), blocked / "below")
        with pytest.raises(CheckpointSaveError):
            write.result(10)
        checkpointer.save(state_of(2), tmp_path / "two")[1].result(30)


def test_close_raises_what_nobody_has_seen(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    checkpointer = build()
    checkpointer.save(state_of(1), blocked / "below")
    with pytest.raises(CheckpointSaveError):
        checkpointer.close()
    checkpointer.close()


@pytest.mark.parametrize("thread", ["the save thread", "the thread that copies"])
def test_a_save_that_no_thread_takes_is_not_waited_for_and_leaves_its_memory(thread: str, tmp_path: Path) -> None:
    outside = Ending("ckpt-save" if "save" in thread else "ckpt-stage")
    overrides = ["checkpoint.stager.arenas=1", "checkpoint.durability=process_crash"]
    with build_checkpointer("async_zero_overhead", overrides, outside=outside) as checkpointer:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpointer.save(state_of(2), tmp_path / "two")
        outside.refused = ()
        checkpointer.wait_staged()
        checkpointer.wait()
        checkpointer.save(state_of(3), tmp_path / "three", may_wait=False)
        checkpointer.wait()
        assert checkpointer.load(tmp_path / "three")["weight"].eq(3).all()
    assert sorted(os.listdir(tmp_path)) == ["three"]


def test_a_save_while_the_interpreter_ends_is_refused_and_leaves_its_memory(tmp_path: Path) -> None:
    outside = Ending()
    with build_checkpointer("async_zero_overhead", ["checkpoint.stager.arenas=1"], outside=outside) as checkpointer:
        checkpointer.save(state_of(1), tmp_path / "one")
        checkpointer.wait()
        outside.ends = True
        with pytest.raises(CheckpointError, match="because the interpreter is ending"):
            checkpointer.save(state_of(2), tmp_path / "two")
        outside.ends = False
        checkpointer.wait_staged()
        checkpointer.save(state_of(3), tmp_path / "three", may_wait=False)
        checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["one", "three"]


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_closed_checkpointer_saves_and_loads_nothing(preset: str, tmp_path: Path) -> None:
    with build_checkpointer(preset) as checkpointer:
        checkpointer.save(state_of(1), tmp_path / "one")
    for call in (
        lambda: checkpointer.save(state_of(2), tmp_path / "two"),
        lambda: checkpointer.load(tmp_path / "one"),
        lambda: checkpointer.prewarm(state_of(2)),
    ):
        with pytest.raises(CheckpointError, match=r"^This checkpointer is closed; build a new one\.$"):
            call()
    checkpointer.close()
    checkpointer.wait()
    assert checkpointer.verify(tmp_path / "one") and os.listdir(tmp_path) == ["one"]


def test_close_ends_the_writer_process_also_when_it_gives_up_a_save_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(saves: InFlightSaves, limit: float) -> None:
        raise CheckpointTimeoutError("a save was still running")

    checkpointer = build("checkpoint.timeouts.close=0.1", "checkpoint.timeouts.write=10")
    with faults.at("write").stops("writer") as stopped, monkeypatch.context() as patch:
        saved = checkpointer.save(state_of(1), tmp_path / "one")[1]
        stopped.wait()
        patch.setattr(InFlightSaves, "wait", hang)
        with pytest.raises(CheckpointTimeoutError, match="still running"):
            checkpointer.close()
    assert isinstance(saved.exception(30), WorkerDiedError)  # and not the deadline of the write
    assert faults.writers() == []
    checkpointer.close()


def test_a_save_is_not_written_before_the_one_ahead_of_it_has_ended(tmp_path: Path) -> None:
    with build("checkpoint.stager.arenas=2") as checkpointer, faults.at("send").holds() as held:
        first = checkpointer.save(state_of(1), tmp_path / "one")[1]
        held.wait()
        second = checkpointer.save(state_of(2), tmp_path / "two")[1]
        with pytest.raises(TimeoutError, match=r"The save still runs after 0\.5 s\."):
            second.result(0.5)
        held.release()
        second.result(30)
        assert first.done()


def test_hooks_of_a_run_hear_of_each_commit_and_change_nothing_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[SaveReport] = []

    def fail(run: NoRun, report: SaveReport) -> None:
        heard.append(report)
        raise RuntimeError("no such hook")

    def leave(run: NoRun, report: SaveReport) -> None:
        heard.append(report)
        sys.exit(1)

    monkeypatch.setattr(NoRun, "after_commit", fail)
    monkeypatch.setattr(NoRun, "after_save", leave)
    with build() as checkpointer:
        saved = checkpointer.save(state_of(1), tmp_path / "one")[1]
        report = saved.result(30)
    assert [each.path for each in heard] == [str(tmp_path / "one")] * 2
    assert report.outcome == "committed"
    assert isinstance(saved, SaveHandle) and saved.report is report
    assert "is committed, but a hook after the commit failed" in caplog.text


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_path_that_exists_is_never_written_into(preset: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("kept")
    (tmp_path / "empty").mkdir()
    with build_checkpointer(preset) as checkpointer:
        with pytest.raises(CheckpointExistsError, match="already exists"):
            checkpointer.save(state_of(1), taken)
        futures = checkpointer.save(state_of(1), tmp_path / "empty")
        if futures is not None:
            futures[1].result(30)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(state_of(2), tmp_path / "empty")
        assert checkpointer.load(tmp_path / "empty")["step"] == 1
    assert (taken / "mine").read_text() == "kept"


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state_of(1), tmp_path / "one")
        data_file = next((tmp_path / "one").glob("*.distcp"))
        data_file.write_bytes(data_file.read_bytes()[:-1])
        with pytest.raises(CheckpointCorruptError, match="lists it with"):
            checkpointer.load(tmp_path / "one")


SCRIPT = """
import sys
import torch
from ckpt_component import build_checkpointer
from ckpt_component.testing import faults

def main():
    checkpointer = build_checkpointer("async_persistent", [f"checkpoint/caller={sys.argv[2]}"])
    state = {"weight": torch.full((1000,), 5.0), "step": 5}
    if sys.argv[3] == "kill":
        with faults.at("publish").kills("trainer"):  # all is written then
            checkpointer.save(state, sys.argv[1])[1].result(60)
    checkpointer.save(state, sys.argv[1])

if __name__ == "__main__":
    main()
"""


def run_script(tmp_path: Path, caller: str, how: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checkpoints" / "one"), caller, how],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,  # and so the writer process's
    )


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("caller", in_turn(["temporal", "persistent"], 2))
def test_a_script_that_forgets_close_still_ends_with_its_last_save(caller: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, caller, "forget")
    assert done.returncode == 0, done.stderr
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(tmp_path / "checkpoints" / "one")["step"] == 5


@pytest.mark.slow
def test_a_trainer_killed_between_write_and_commit_keeps_its_checkpoint(tmp_path: Path) -> None:
    done = run_script(tmp_path, "persistent", "kill")
    assert done.returncode == -signal.SIGKILL
    # capture_output ended, so the writer process, which shares the pipe, has ended too.
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(tmp_path / "checkpoints" / "one")["step"] == 5
    assert os.listdir(tmp_path / "checkpoints") == ["one"]


@pytest.mark.parametrize("preset", ["async_persistent", "async_zero_overhead"])
def test_a_copy_that_fails_before_save_returns_gives_its_memory_back(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no such memory")

    with build("checkpoint.stager.arenas=1", preset=preset) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(CopyTasks, "finish", failing)
            patch.setattr(BackgroundCopy, "__init__", failing)
            with pytest.raises(RuntimeError, match="no such memory"):
                checkpointer.save(state_of(1), tmp_path / "one")
        assert not checkpointer.busy
        checkpointer.save(state_of(2), tmp_path / "two")[1].result(30)
    assert os.listdir(tmp_path) == ["two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("async_persistent", "interrupted; waiting until step 5 is saved. Another Ctrl-C does not lose it."),
        ("sync", "interrupted; waiting until iter_0000005 is saved"),
    ],
)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_does_not_lose_a_save(times: int, preset: str, text: str, tmp_path: Path) -> None:
    """The second one interrupts the wait of `close`, or is held back by an inline save, which ends before the process."""
    script = Path(__file__).parent / "scripts" / "interrupted.py"
    done = run_program([str(script), str(tmp_path / "run"), str(times), preset], tmp_path)
    assert text in done.stdout and "\nKeyboardInterrupt" in done.stdout
    assert done.stdout.count("the listener is closed") == 1
    with build_manager("sync", dir=tmp_path / "run") as manager:
        assert manager.steps() == [5]


def test_ctrl_c_within_the_copy_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build_manager("async_persistent", dir=tmp_path) as manager:
        with faults.at("stage").raises(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            manager.save(1, state_of(1))
        assert manager.save(2, state_of(2))
    assert f"interrupted before the snapshot of {tmp_path}/iter_0000001 was complete, so it is not saved" in caplog.text
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.steps() == [2]


def test_a_program_that_forgets_close_says_which_step_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "forgets.py").write_text(
        "import torch\n"
        "from ckpt_component import build_manager\n"
        "manager = build_manager('async_persistent', ['checkpoint.save.every_steps=2'], dir='run')\n"
        "for step in (1, 2, 3):\n"
        "    manager.maybe_save(step, {'weight': torch.ones(2)})\n"
    )
    done = run_program(["forgets.py"], tmp_path)
    assert done.returncode == 0 and done.stdout.count("step 3 is not saved: the program ended before the end of") == 1
    with build_manager("sync", dir=tmp_path / "run") as manager:
        assert manager.steps() == [2]


@pytest.mark.parametrize("step", [4, 6])
def test_a_refusal_that_the_program_caught_is_not_raised_again_at_the_end(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = state_of(5)
    with build_manager("sync", dir=tmp_path / "run") as manager:
        manager.save(5, state)
        with pytest.raises(CheckpointError, match="Step 4 is not after step 5" if step == 4 else "holds a"):
            manager.save(step, {**state, "bad": lambda: 0} if step == 6 else state)
    assert caplog.text.count("the last step is not saved: ") == 1 and manager.steps() == [5]


def test_a_last_step_that_failed_is_tried_once_more_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FAILPOINT_LOG, str(tmp_path / "operations"))
    monkeypatch.setenv(FAILPOINT, "create:path=iter_0000002:nth=1:action=raise:ENOSPC")
    with (
        build_manager("sync", dir=tmp_path / "run") as manager,
        pytest.raises(CheckpointSaveError, match="No space left"),
    ):
        manager.save(2, state_of(2))
    assert caplog.text.count("trying once more to save step 2, because it is the last one") == 1
    assert manager.steps() == [2]
