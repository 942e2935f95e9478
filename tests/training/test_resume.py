"""Training 2N steps is N steps, resume, N steps: weights, optimizer, generators, data and losses, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_train.loop import run
from ckpt_train.report import Summary
from ckpt_train.training_job import TrainingJob
from omegaconf import DictConfig

from ckpt_component import stored_metrics
from ckpt_component.errors import CheckpointLoadError, CheckpointNotFoundError
from ckpt_component.state.flatten import flatten
from ckpt_component.state.paths import key_of

Composed = Callable[..., DictConfig]
N = 6  # an epoch of the text ends in step 5, so the second half begins inside a shuffled epoch


def trained(config: DictConfig, folder: Path) -> tuple[TrainingJob, Summary]:
    job = TrainingJob(config, "/")
    return job, run(job, config.checkpoint, str(folder))


def assert_same(first: Any, second: Any, key: str) -> None:
    assert type(first) is type(second), key
    if isinstance(first, (torch.Tensor, np.ndarray)):
        assert first.dtype == second.dtype and first.shape == second.shape, key
        assert (first == second).all(), key
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), key
        for one, other in zip(first, second, strict=True):
            assert_same(one, other, key)
    else:
        assert first == second, key


def assert_same_state(first: TrainingJob, second: TrainingJob) -> None:
    one, other = flatten(first.state), flatten(second.state)
    assert one.tensor_paths == other.tensor_paths and one.object_paths == other.object_paths
    for path, mine, yours in zip(one.tensor_paths, one.tensors, other.tensors, strict=True):
        assert_same(mine, yours, key_of(path))
    for path, mine, yours in zip(one.object_paths, one.objects, other.objects, strict=True):
        assert_same(mine, yours, key_of(path))


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async_persistent", "async_temporal", "async_zero_overhead"])
@pytest.mark.parametrize("writer", ["dcp", pytest.param("torch_save", marks=pytest.mark.soak)])
def test_a_resumed_run_is_the_uninterrupted_one(
    compose_job: Composed, tmp_path: Path, preset: str, writer: str
) -> None:
    choice = (f"checkpoint={preset}", f"checkpoint/writer={writer}", "checkpoint.save.every_steps=2")
    whole, figures = trained(compose_job(*choice, f"train.steps={2 * N}"), tmp_path / "whole")
    _, first = trained(compose_job(*choice, f"train.steps={N}"), tmp_path / "parts")
    # Whatever the process did in between must not matter.
    torch.rand(7), random.random(), np.random.rand(3)
    resumed, second = trained(compose_job(*choice, f"train.steps={2 * N}"), tmp_path / "parts")

    assert (first.start, second.start) == (0, N)
    assert first.losses + second.losses == figures.losses
    assert first.validation[-1] != second.validation[-1] and second.validation[-1] == figures.validation[-1]
    assert_same_state(resumed, whole)
    assert resumed.state["progress"]["tokens"] == 2 * N * 2 * 2 * 16


def test_the_comparison_sees_a_difference(compose_job: Composed, tmp_path: Path) -> None:
    first, _ = trained(compose_job("checkpoint=off", "train.steps=2"), tmp_path)
    second, _ = trained(compose_job("checkpoint=off", "train.steps=2", "train.seed=7"), tmp_path)
    with pytest.raises(AssertionError, match=r"model\."):
        assert_same_state(first, second)


def test_every_step_is_saved_when_due_and_the_last_one_too(compose_job: Composed, tmp_path: Path) -> None:
    _, summary = trained(compose_job("train.steps=5", "checkpoint.save.every_steps=2"), tmp_path)
    assert [(report.step, report.outcome) for report in summary.reports] == [
        (2, "committed"),
        (4, "committed"),
        (5, "committed"),
    ]


def test_a_run_that_is_done_trains_no_further(compose_job: Composed, tmp_path: Path) -> None:
    done, _ = trained(compose_job("train.steps=3"), tmp_path)
    again, summary = trained(compose_job("train.steps=3"), tmp_path)
    assert (summary.start, summary.step, summary.reports) == (3, 3, [])
    assert_same_state(again, done)


def test_off_saves_nothing(compose_job: Composed, tmp_path: Path) -> None:
    _, summary = trained(compose_job("checkpoint=off", "train.steps=3"), tmp_path / "none")
    assert summary.step == 3 and summary.reports == [] and not (tmp_path / "none").exists()


def test_another_model_is_refused_by_key(compose_job: Composed, tmp_path: Path) -> None:
    trained(compose_job("train.steps=2"), tmp_path)
    with pytest.raises(CheckpointLoadError, match=r"model\.tokens\.weight.*shape"):
        trained(compose_job("train.steps=3", "model.width=32"), tmp_path)


def test_another_text_is_refused(compose_job: Composed, tmp_path: Path, text_file: Path) -> None:
    trained(compose_job("train.steps=2"), tmp_path / "checkpoints")
    text_file.write_bytes(text_file.read_bytes()[::-1])
    with pytest.raises(CheckpointLoadError, match="the text is not the one that training began with"):
        trained(compose_job("train.steps=3"), tmp_path / "checkpoints")


def test_must_resume_without_a_checkpoint_is_refused(compose_job: Composed, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint\.resume=must"):
        trained(compose_job("checkpoint.resume=must"), tmp_path)


def test_a_higher_learning_rate_in_the_config_counts_after_a_resume(compose_job: Composed, tmp_path: Path) -> None:
    trained(compose_job("train.steps=5", "train.lr=0.001"), tmp_path)
    job, _ = trained(compose_job("train.steps=6", "train.lr=0.004"), tmp_path)
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.004, rel=1e-3)


@pytest.mark.slow
def test_the_checkpoint_with_the_best_validation_loss_is_kept_and_is_where_another_run_begins(
    compose_job: Composed, tmp_path: Path
) -> None:
    best = ("checkpoint.save.every_steps=2", "checkpoint.keep.last=1", "checkpoint.keep.best.metric=validation_loss")
    _, summary = trained(compose_job(*best, "train.steps=9", "train.eval_every=2", "train.lr=0.3"), tmp_path)
    step, loss = min(summary.validation, key=lambda entry: (entry[1], entry[0]))
    assert stored_metrics(tmp_path / f"iter_{step:07d}")["validation_loss"] == loss
    resume = (*best, "checkpoint.resume=best", "checkpoint.rewind=true")
    _, again = trained(compose_job(*resume, "train.steps=9", "train.eval_every=2", "train.lr=0.3"), tmp_path)
    assert again.start == step < 9


# --- what differs from the run that saved the checkpoint ------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about other settings since the last call."""
    lines = [record.getMessage() for record in caplog.records if "has other settings" in record.getMessage()]
    caplog.clear()
    return lines


@pytest.mark.slow
def test_keys_that_mean_another_run_are_named_with_both_values(
    compose_job: Composed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(compose_job("train.steps=2", "train.lr=0.001", "data.max_bytes=1MB"), tmp_path)
    trained(
        compose_job(
            *("train.steps=3", "train.lr=0.004", "train.clip_norm=null", "data.max_bytes=1000000"),
            *("train.log_every=2", "train.threads=1", "checkpoint.keep.last=5", "checkpoint/writer=torch_save"),
        ),
        tmp_path,
    )
    assert warnings_of(caplog) == [
        "this run has other settings than the checkpoint iter_0000002 (then -> now): train.lr 0.001 -> 0.004, "
        "train.clip_norm 1.0 -> null"
    ]
    trained(compose_job("train.steps=4", "train.lr=0.004", "train.clip_norm=null", "data.max_bytes=1MB"), tmp_path)
    assert warnings_of(caplog) == []


def test_they_are_named_before_the_error_of_a_model_that_does_not_fit(
    compose_job: Composed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(compose_job("train.steps=2"), tmp_path)
    with pytest.raises(CheckpointLoadError, match="shape"):
        trained(compose_job("train.steps=3", "model.width=32"), tmp_path)
    (line,) = warnings_of(caplog)
    assert line.endswith(": model.width 16 -> 32")


@pytest.mark.slow
def test_a_text_from_the_environment_is_compared_as_it_is_now(
    compose_job: Composed,
    tmp_path: Path,
    text_file: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPT_TEST_TEXT", str(text_file))
    where = "data.path='${oc.env:CKPT_TEST_TEXT}'"
    trained(compose_job("train.steps=2", where), tmp_path)
    trained(compose_job("train.steps=3"), tmp_path)
    trained(compose_job("train.steps=4", where), tmp_path)
    assert warnings_of(caplog) == []


@pytest.mark.slow
def test_a_checkpoint_of_another_program_is_not_compared(
    compose_job: Composed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ckpt_component import build_checkpointer, build_manager

    caplog.set_level("INFO")
    job = TrainingJob(compose_job(), "/")
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(job.state, tmp_path / "iter_0000001")
    with build_manager("sync", dir=tmp_path / "other") as manager:
        manager.save(1, job.state)
    for path, text in ((tmp_path, "has no run.json"), (tmp_path / "other", "is not of this program")):
        trained(compose_job("train.steps=1", f"checkpoint.resume={path}/iter_0000001"), tmp_path / path.name)
        assert text in caplog.text and warnings_of(caplog) == []
