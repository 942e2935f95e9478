"""`max_stall_s`: training waits so long and no longer, whatever it would wait for. Hung storage, hung writer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    CheckpointBusyError,
    CheckpointConfigError,
    CheckpointGivenUpError,
    CheckpointManager,
    CheckpointStallError,
    CheckpointTimeoutError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.testing import faults

#: Several times `max_stall_s` in these tests, for a busy machine, and far below every other deadline.
LONG = 6.0


def manager_in(root: Path, *overrides: str, preset: str = "async_persistent") -> CheckpointManager:
    return build_manager(preset, ["checkpoint.save.at_end=false", "checkpoint.max_stall_s=1.0", *overrides], dir=root)


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value), "step": int(value)}


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Processes that were stopped, and go on at the end whatever happens."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended well
            os.kill(pid, signal.SIGCONT)


def stop_writer(stopped: list[int]) -> int:
    [pid] = faults.writers()
    os.kill(pid, signal.SIGSTOP)
    stopped.append(pid)
    return pid


@pytest.mark.slow
def test_the_log_divides_a_copy_from_the_wait_for_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = "checkpoint.writer.max_bytes_per_second=1MB"  # a save of 2 MB takes two seconds
    with caplog.at_level("INFO", "ckpt_component"), build_manager("async_persistent", [slow], dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.ones(500_000)})
    _, second = (each for each in caplog.messages if " staged: " in each)
    assert re.fullmatch(r"iter_0000002 staged: 2\.00 MB in \S+ s, after waiting \S+ s for memory", second)


@pytest.mark.slow
def test_a_hung_writer_stalls_the_next_save_by_max_stall_s_and_the_error_names_the_save(
    tmp_path: Path, stopped: list[int]
) -> None:
    with manager_in(tmp_path) as manager:
        pid = stop_writer(stopped)
        manager.save(1, state_of(1))
        before = time.monotonic()
        with pytest.raises(
            CheckpointStallError, match=r"no staging memory became free within 1 s .*max_stall_s.*iter_0000001"
        ) as caught:
            manager.save(2, state_of(2))
        assert 1.0 <= time.monotonic() - before < LONG
        assert isinstance(caught.value, CheckpointTimeoutError)
        os.kill(pid, signal.SIGCONT)
        manager.wait()
        assert manager.save(3, state_of(3))
        manager.wait()
    assert manager.steps() == [1, 3]


@pytest.mark.turns(3)
@pytest.mark.slow
def test_with_warn_a_save_that_would_stall_is_skipped_and_counts_as_a_failure_in_a_row(
    tmp_path: Path, stopped: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with manager_in(tmp_path, "checkpoint.on_error=warn") as manager:
        pid = stop_writer(stopped)
        manager.save(1, state_of(1))
        assert manager.save(2, state_of(2)) is False
        assert manager.save(3, state_of(3)) is False
        with pytest.raises(CheckpointGivenUpError, match=r"3 saves in a row.*iter_0000001"):
            manager.save(4, state_of(4))
        os.kill(pid, signal.SIGCONT)
        manager.wait()
    assert [(report.step, report.outcome) for report in manager.reports] == [
        (2, "skipped"),
        (3, "skipped"),
        (1, "committed"),
    ]
    assert "iter_0000002 was not saved, and training continues" in caplog.text


def test_without_the_key_a_save_waits_as_long_as_the_phase_may_take(tmp_path: Path, stopped: list[int]) -> None:
    with manager_in(tmp_path, "checkpoint.max_stall_s=null", "checkpoint.timeouts.stage=0.5") as manager:
        pid = stop_writer(stopped)
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointTimeoutError, match=r"after 0\.5 s \(timeouts\.stage\)") as caught:
            manager.save(2, state_of(2))
        assert not isinstance(caught.value, CheckpointStallError)
        os.kill(pid, signal.SIGCONT)
        manager.wait()


@pytest.mark.slow
def test_storage_that_does_not_answer_whether_the_path_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    with manager_in(tmp_path) as manager:
        monkeypatch.setattr(FileStorage, "exists", lambda *_: not answers.wait(60))
        before = time.monotonic()
        with pytest.raises(CheckpointStallError, match="storage did not answer"):
            manager.save(1, state_of(1))
        assert time.monotonic() - before < LONG
        answers.set()
        assert manager.save(2, state_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_fence_of_zero_overhead_lets_the_optimizer_go_and_the_snapshot_is_thrown_away(
    on_error: str, tmp_path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    overrides = ("checkpoint.stager.arenas=1", f"checkpoint.on_error={on_error}", "checkpoint.overlap=error")
    with (
        manager_in(tmp_path, *overrides, preset="async_zero_overhead") as manager,
        faults.at("copy").holds() as held,
    ):
        manager.guard(optimizer)
        manager.save(1, {"weight": parameter})
        held.wait()
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            before = time.monotonic()
            optimizer.step()
            assert time.monotonic() - before < LONG
        assert torch.equal(parameter.detach(), torch.full((1000,), -0.5))
        # The copy still runs, into memory that no other save may have before it ends.
        if on_error == "raise":
            with pytest.raises(CheckpointBusyError):
                manager.save(2, {"weight": parameter})
        held.release()
        if on_error == "raise":
            with pytest.raises(CheckpointStallError, match=r"thrown away.*1 s.*max_stall_s"):
                manager.wait()
        else:
            manager.wait()
        manager.save(2, {"weight": parameter})
        optimizer.zero_grad()
        manager.wait()
    outcome = "failed" if on_error == "raise" else "skipped"
    assert [(report.step, report.outcome) for report in manager.reports] == [(1, outcome), (2, "committed")]
    with build_checkpointer("sync") as checkpointer:
        assert torch.equal(checkpointer.load(tmp_path / "iter_0000002")["weight"], torch.full((1000,), -0.5))


def test_memory_goes_back_only_when_nothing_is_copied_into_it_any_more(tmp_path: Path) -> None:
    overrides = ["checkpoint.timeouts.stage=0.3", "checkpoint.stager.arenas=1"]
    checkpointer = build_checkpointer("async_zero_overhead", overrides)
    with faults.at("copy").holds():
        futures = checkpointer.save(state_of(1), tmp_path / "one")
        assert futures is not None
        with pytest.raises(CheckpointTimeoutError, match="not complete"):
            futures[1].result(30)
        assert checkpointer.busy
    checkpointer.wait_staged(30)
    futures = checkpointer.save(state_of(2), tmp_path / "two")
    assert futures is not None and futures[1].result(30).outcome == "committed"
    checkpointer.close()


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_save_that_training_waits_for_anyway_cannot_be_bounded(preset: str, tmp_path: Path) -> None:
    overrides = ["checkpoint.max_stall_s=5", "checkpoint/caller=inline"]
    with pytest.raises(
        CheckpointConfigError, match=r"max_stall_s=5.0 .*caller=inline training waits for the whole write"
    ):
        build_manager(preset, overrides, dir=tmp_path)
    with pytest.raises(CheckpointConfigError, match="max_stall_s"):
        build_checkpointer(preset, overrides)
