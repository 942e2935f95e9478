"""Steps of a run increase: what would be saved below its newest step is refused, because `keep` would delete it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ckpt_component import CheckpointExistsError, CheckpointManager, CheckpointStepError, build_manager

PRESETS = pytest.mark.parametrize("preset", ["sync", "async_persistent"])


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=50", "checkpoint.save.at_end=false"]
    return build_manager(preset, [*usual, *overrides], dir=root)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(step)), "step": step}


def saved(root: Path, *steps: int) -> Path:
    with manager_in(root, "checkpoint.keep.last=null") as manager:
        for step in steps:
            manager.save(step, state_of(step))
    return root


# --- after a restore ------------------------------------------------------------------------------------------------


@PRESETS
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_loop_that_ignores_what_restore_returned_is_refused_at_its_first_save(
    on_error: str, preset: str, tmp_path: Path
) -> None:
    saved(tmp_path, 900, 950, 1000)
    with manager_in(tmp_path, f"checkpoint.on_error={on_error}", preset=preset) as manager:
        manager.restore(state_of(0))
        for step in range(1, 50):
            assert not manager.maybe_save(step, state_of(step))
        with pytest.raises(CheckpointStepError) as caught:
            manager.maybe_save(50, state_of(50))
        assert manager.save(1000, state_of(1000)) is False  # saved already
        assert manager.save(1001, state_of(1001))
    assert manager.steps() == [950, 1000, 1001]
    assert str(caught.value) == (
        "Step 50 is not after step 1000, which this run restored: begin at (manager.restore(state) or 0) + 1 "
        "(docs/failures.md#going-back-to-an-earlier-step)."
    )


def test_the_last_step_of_such_a_loop_is_refused_at_the_end(tmp_path: Path) -> None:
    saved(tmp_path, 1000)
    with (
        pytest.raises(CheckpointStepError, match="^Step 3 is not after step 1000"),
        manager_in(tmp_path, "checkpoint.save.at_end=true") as manager,
    ):
        manager.restore(state_of(0))
        for step in (1, 2, 3):
            manager.maybe_save(step, state_of(step))
    assert manager.steps() == [1000]


def test_a_run_that_is_stopped_while_it_repeats_steps_ends_as_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1000)
    with manager_in(tmp_path) as manager:
        manager.stop_on_signal(signal.SIGUSR1)
        manager.restore(state_of(0))
        manager.maybe_save(991, state_of(991))  # from the beginning of the epoch
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_stop()
    assert "the last step is not saved: Step 991 is not after step 1000" in caplog.text
    with pytest.raises(SystemExit, match="85"):
        manager.exit_if_stopped()


def test_a_run_that_began_elsewhere_counts_its_own_steps(tmp_path: Path) -> None:
    base, own = saved(tmp_path / "base", 7000) / "iter_0007000", tmp_path / "own"
    with manager_in(own, f"checkpoint.resume={base}") as manager:
        assert manager.restore(state_of(0)) == 7000
        for step in (1, 2):
            assert manager.save(step, state_of(step))
    # The same command again: its first checkpoints are there, and `keep` would prefer them.
    shutil.rmtree(own / "iter_0000001")
    with manager_in(own, f"checkpoint.resume={base}") as manager:
        assert manager.restore(state_of(0)) == 7000
        with pytest.raises(CheckpointExistsError, match=r"Step 1 is the first .* step 2\. .*resume=auto"):
            manager.save(1, state_of(1))
        assert manager.save(7001, state_of(7001))
        assert manager.steps() == [2, 7001]


def test_begin_at_is_a_beginning_too(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    with manager_in(tmp_path, "checkpoint.rewind=true") as manager:
        manager.begin_at(5)
        with pytest.raises(CheckpointStepError, match="Step 4 is not after step 5, which this run restored"):
            manager.save(4, state_of(4))
        assert manager.save(6, state_of(6))
        manager.begin_at(0)  # from scratch; both are retired
        assert manager.save(1, state_of(1))
        assert manager.steps() == [1]


def test_rewind_goes_back_within_a_run(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    with manager_in(tmp_path, "checkpoint.resume=3", "checkpoint.rewind=true") as manager:
        for _ in range(2):
            assert manager.restore(state_of(0)) == 3
            with pytest.raises(CheckpointStepError, match="Step 2 is not after step 3"):
                manager.save(2, state_of(2))
            assert manager.save(6, state_of(6))


# --- after a save ---------------------------------------------------------------------------------------------------


@PRESETS
def test_a_step_below_the_last_saved_one_is_refused(preset: str, tmp_path: Path) -> None:
    with manager_in(tmp_path, preset=preset) as manager:
        manager.save(10, state_of(10))
        with pytest.raises(CheckpointStepError) as caught:
            manager.save(5, state_of(5))
        assert manager.save(10, state_of(10)) is False
    assert str(caught.value).startswith("Step 5 is not after step 10, which this run saved last: ")
    assert "checkpoint.resume=5 checkpoint.rewind=true" in str(caught.value)
    assert manager.steps() == [10]


@PRESETS
def test_an_earlier_step_than_one_whose_save_failed_is_refused_too(preset: str, tmp_path: Path) -> None:
    """Ranks learn of a failure at different times, and must decide alike."""
    with manager_in(tmp_path, "checkpoint.on_error=warn", preset=preset) as manager:
        manager.save(10, {"weight": torch.ones(3).to_sparse()})
        manager.wait()
        assert [report.outcome for report in manager.reports] == ["failed"]
        with pytest.raises(CheckpointStepError, match="Step 5 is not after step 10"):
            manager.save(5, state_of(5))
        assert manager.save(10, state_of(10))  # once more


@PRESETS
def test_keep_never_deletes_what_was_just_committed(preset: str, tmp_path: Path) -> None:
    elsewhere = saved(tmp_path / "elsewhere", 900, 1000)
    own = tmp_path / "own"
    with manager_in(own, "checkpoint.keep.last=1", preset=preset) as manager:
        manager.restore(state_of(0))
        for name in ("iter_0000900", "iter_0001000"):  # copied there by hand while the run trains
            shutil.copytree(elsewhere / name, own / name)
        manager.save(1, state_of(1))
        manager.wait()
    assert manager.steps() == [1, 1000]


@pytest.mark.slow
def test_two_ranks_refuse_together_and_go_on(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "step_order.py", "refused", 2, tmp_path)
