"""What a job returns to a sweeper."""

from __future__ import annotations

from typing import Any

import pytest
from ckpt_train.objectives import OBJECTIVES, objective_names, objectives_of, refuse_typos
from ckpt_train.report import Summary
from omegaconf import OmegaConf

from ckpt_component import CheckpointConfigError

FIGURES = {"first_stall_s": 3.0, "stall_s": 1.0, "durable_s": 2, "loss": None}


@pytest.mark.parametrize(
    ("objectives", "names"),
    [("durable_s", ["durable_s"]), (["stall_s", "durable_s"], ["stall_s", "durable_s"]), (["loss"], ["loss"])],
)
def test_one_name_or_a_list(objectives: Any, names: list[str]) -> None:
    assert objective_names(OmegaConf.create({"objectives": objectives})) == names
    assert objective_names(OmegaConf.create({})) == ["stall_s"]


@pytest.mark.parametrize(
    ("objectives", "text"),
    [
        ("stal_s", "Did you mean objectives=stall_s?"),
        (["durable_s", "speed"], "objectives must be stall_s, .* or validation_loss, got speed."),
        ([], "name one, or several: objectives=.stall_s,durable_s."),
        (None, "got None"),
        (3, "got 3"),
    ],
)
def test_others_are_refused_before_anything_is_trained(objectives: Any, text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=text):
        objective_names(OmegaConf.create({"objectives": objectives}))


def test_a_typo_on_the_command_line_is_refused_before_a_sweep_begins() -> None:
    refuse_typos(["-m", "objectives=[stall_s,durable_s]", "train.steps=2"])
    refuse_typos(["objectives=stall_s,durable_s"])  # a sweep over them: each job has its own
    for word in ("objectives=[stal_s,durable_s]", "+objectives=stal_s"):
        with pytest.raises(CheckpointConfigError, match="Did you mean objectives=stall_s?"):
            refuse_typos(["-m", word])


def test_values_come_in_the_order_of_their_names() -> None:
    assert objectives_of(["stall_s"], FIGURES) == 1.0
    assert objectives_of(["durable_s", "stall_s"], FIGURES) == [2.0, 1.0]
    assert objectives_of(["stall_s"], {"first_stall_s": 3.0, "stall_s": None}) == 3.0


def test_a_job_without_a_figure_returns_nothing() -> None:
    assert objectives_of(["durable_s", "loss"], FIGURES) is None
    assert objectives_of(["stall_s"], Summary().figures()) is None


def test_every_objective_is_a_figure() -> None:
    assert set(OBJECTIVES) <= set(Summary().figures())
