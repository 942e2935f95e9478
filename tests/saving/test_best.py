"""Metrics of a save, `keep.best`, and `resume=best`."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointTypeError,
    build_manager,
)

NAN = math.nan


def manager_in(
    root: Path, *overrides: str, preset: str = "sync", keep: int = 1, metric: str = "loss"
) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", f"checkpoint.keep.last={keep}", f"checkpoint.keep.best.metric={metric}"]
    return build_manager(preset, [*usual, *overrides], dir=root)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def trained(root: Path, losses: dict[int, Any], *overrides: str, **options: Any) -> list[int]:
    """Save each step with its loss; None: without metrics. Gives the steps that are kept, oldest first."""
    with manager_in(root, *overrides, **options) as manager:
        manager.restore(state_of(0))
        for step, loss in losses.items():
            manager.maybe_save(step, state_of(step), metrics=None if loss is None else {"loss": loss})
    return manager.steps()


def manifest_of(path: Path) -> dict[str, Any]:
    content = json.loads((path / "manifest.json").read_bytes(), parse_constant=pytest.fail)
    return dict(content["manifest"])


# --- keep.best ------------------------------------------------------------------------------------------------------


def test_the_best_of_an_earlier_run_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    assert trained(tmp_path, {1: 0.5, 2: 0.2, 3: 0.4}) == [2, 3]
    assert trained(tmp_path, {4: 0.9, 5: 0.3}) == [2, 5]
    with manager_in(tmp_path) as manager:
        assert manager.best_steps() == [2, 5]
    assert trained(tmp_path, {6: 0.1, 7: 0.9}) == [6, 7]


def test_several_best_ones_and_the_largest_value(tmp_path: Path) -> None:
    overrides = ("checkpoint.keep.best.mode=max", "checkpoint.keep.best.last=2", "checkpoint.keep.every_steps=3")
    assert trained(tmp_path, dict(enumerate([7, 2, 1, 9, 5, 4, 6, 3], 1)), *overrides) == [1, 3, 4, 6, 8]


def test_checkpoints_of_a_run_without_metrics_and_with_them_stand_side_by_side(tmp_path: Path) -> None:
    with build_manager("sync", ["checkpoint.save.every_steps=1"], dir=tmp_path) as manager:
        for step in (1, 2):
            manager.maybe_save(step, state_of(step))
    assert "metrics" not in manifest_of(tmp_path / "iter_0000002")
    assert trained(tmp_path, {3: 0.4, 4: 0.6, 5: None}) == [3, 5]


def test_what_has_no_metric_or_nan_is_never_the_best_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ckpt_component")
    assert trained(tmp_path, {1: NAN, 2: None, 3: 5.0, 4: None, 5: NAN, 6: math.inf}) == [3, 6]
    assert [record.getMessage() for record in caplog.records] == [
        "step 1 is never the best checkpoint (checkpoint.keep.best): its metric 'loss' is NaN",
        "step 2 is never the best checkpoint (checkpoint.keep.best): it has no metric 'loss'",
    ]


def test_a_name_that_is_misspelt_is_suggested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, {1: 0.5}, metric="los")
    assert "it has no metric 'los' (did you mean checkpoint.keep.best.metric=loss?)" in caplog.text
    trained(tmp_path, {2: 0.5}, metric="accuracy")
    assert "it has no metric 'accuracy', only 'loss'" in caplog.text


def test_without_keep_best_metrics_are_stored_and_nothing_is_compared(tmp_path: Path) -> None:
    with build_manager("sync", ["checkpoint.keep.last=1"], dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), metrics={"loss": step / 10, "diverged": NAN, "norm": -math.inf})
    assert manager.steps() == [2] and manager.best_steps() == []
    assert manifest_of(tmp_path / "iter_0000002")["metrics"] == {"loss": 0.2, "diverged": "nan", "norm": "-inf"}


def test_the_last_save_has_the_metrics_of_the_last_step(tmp_path: Path) -> None:
    overrides = ["checkpoint.save.every_steps=null", "checkpoint.keep.best.metric=loss"]
    with build_manager("sync", overrides, dir=tmp_path) as manager:
        for step in (1, 2):
            assert not manager.maybe_save(step, state_of(step), metrics={"loss": step})
    assert manifest_of(tmp_path / "iter_0000002")["metrics"] == {"loss": 2.0}


@pytest.mark.parametrize(
    "value", [1, 0.5, True, torch.tensor(0.5), torch.ones(1, 1, requires_grad=True), np.float32(0.25), np.int64(3)]
)
def test_whatever_is_a_number_is_a_metric(value: Any, tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, state_of(1), metrics={"loss": value})
    assert manifest_of(tmp_path / "iter_0000001")["metrics"] == {"loss": getattr(value, "item", lambda: value)()}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"loss": "0.5"}, r"metrics\['loss'\] is '0.5', a str and not one number; pass float\(value\)\."),
        ({"loss": torch.ones(2)}, r"metrics\['loss'\] is of shape \(2,\) and not one number"),
        ({"loss": None}, r"metrics\['loss'\] is None"),
        ({1: 0.5}, r"metrics has the name 1; names are strings"),
        (0.5, r"metrics is 0.5, a float; pass numbers by name: metrics=\{'loss': 0.5\}\."),
    ],
)
def test_what_is_no_number_by_name_is_refused(metrics: Any, text: str, tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        with pytest.raises(CheckpointTypeError, match=text):
            manager.save(1, state_of(1), metrics=metrics)
        assert manager.steps() == [] and manager.save(1, state_of(1), metrics={"loss": 1})


# --- resume=best ----------------------------------------------------------------------------------------------------

BEST, REWIND = "checkpoint.resume=best", "checkpoint.rewind=true"
RESTORES_ONLY = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")


def restored(root: Path, *overrides: str, **options: Any) -> int | None:
    state = state_of(0)
    with manager_in(root, "checkpoint.save.at_end=false", *overrides, **options) as manager:
        step = manager.restore(state)
    assert step is None or state["weight"].eq(step).all()
    return step


def test_a_run_begins_with_the_best_and_what_follows_it_is_refused_or_retired(tmp_path: Path) -> None:
    trained(tmp_path, {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.3}, keep=3)
    assert restored(tmp_path, BEST, *RESTORES_ONLY) == 2
    with pytest.raises(CheckpointExistsError, match="checkpoint.resume=best, and in .* steps 3, 4 would follow step 2"):
        restored(tmp_path, BEST)
    assert restored(tmp_path, BEST, "checkpoint.keep.best.mode=max", *RESTORES_ONLY) == 3
    assert restored(tmp_path, BEST, REWIND) == 2
    with manager_in(tmp_path) as manager:
        assert manager.steps() == [2]
    assert sorted(path.name.split(".")[2] for path in tmp_path.glob(".ckpt-quarantine.*")) == [
        "iter_0000003",
        "iter_0000004",
    ]
    assert trained(tmp_path, {3: 0.1}, BEST) == [3]


def test_a_script_that_begins_with_the_best_and_never_restores_is_refused_at_its_first_save(tmp_path: Path) -> None:
    trained(tmp_path, {1: 0.1, 2: 0.2}, keep=2)
    never_at_end = manager_in(tmp_path, BEST, "checkpoint.save.at_end=false")
    with never_at_end as manager, pytest.raises(CheckpointExistsError, match="Step 1 is the first"):
        manager.save(1, state_of(1))


def test_a_damaged_best_one_is_no_reason_to_take_a_worse_one(tmp_path: Path) -> None:
    trained(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3}, keep=3)
    (tmp_path / "iter_0000001" / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointCorruptError, match="checkpoint.resume=best, and that checkpoint cannot be used: .*_0000001"
    ):
        restored(tmp_path, BEST, *RESTORES_ONLY)
    with manager_in(tmp_path) as manager:
        assert manager.best_steps() == [2, 3]


def test_there_must_be_a_metric_to_compare(tmp_path: Path) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        build_manager("sync", [BEST], dir=tmp_path)
    assert "checkpoint.keep.best.metric is null" in str(caught.value)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("losses", "metric", "text"),
    [
        ({}, "loss", "has no committed checkpoint"),
        ({1: None}, "loss", "no checkpoint in .* has the metric 'loss'. To continue"),
        ({1: NAN}, "loss", "no checkpoint in .* has the metric 'loss'"),
        ({1: 0.5}, "lose", r"has the metric 'lose' \(did you mean checkpoint.keep.best.metric=loss\?\)"),
        ({1: 0.5}, "accuracy", "has the metric 'accuracy', only 'loss'. To continue from the newest"),
    ],
)
def test_some_checkpoint_must_have_it(losses: dict[int, Any], metric: str, text: str, tmp_path: Path) -> None:
    trained(tmp_path, losses)
    with pytest.raises(CheckpointNotFoundError, match=f"checkpoint.resume=best, but .*{text}"):
        restored(tmp_path, BEST, metric=metric)


def test_a_folder_named_best_needs_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "old", {7: 0.5})
    (tmp_path / "best").symlink_to(tmp_path / "old" / "iter_0000007")
    monkeypatch.chdir(tmp_path)
    state = state_of(0)
    with manager_in(tmp_path / "new", "checkpoint.resume=./best") as manager:
        assert manager.restore(state) == 0 and state["step"] == 7


# --- manifests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [[1], {"loss": "low"}, {"loss": None}, {"loss": True}, {"loss": [1]}])
def test_metrics_that_are_none_are_damage(metrics: Any, tmp_path: Path) -> None:
    from forging import edit_manifest

    trained(tmp_path, {1: 0.5, 2: 0.7}, keep=2)
    edit_manifest(tmp_path / "iter_0000001", lambda content: {**content, "metrics": metrics})
    with manager_in(tmp_path) as manager:
        assert manager.steps() == [2]


# --- several ranks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_several_ranks_the_first_ones_metrics_count(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "best.py", "compared", 2, tmp_path)
