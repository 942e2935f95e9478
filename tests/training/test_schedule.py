from __future__ import annotations

import logging

import pytest
import torch

from ckpt_component.apps.training.model import Gpt
from ckpt_component.apps.training.schedule import CosineSchedule, build_optimizer, renew_settings
from ckpt_component.apps.training.schema import Model, Train


@pytest.fixture
def optimizer() -> torch.optim.AdamW:
    return build_optimizer(Gpt(Model(layers=1, heads=1, width=8, context=4)), Train(lr=1.0, weight_decay=0.1))


def schedule(optimizer: torch.optim.Optimizer, **shape: float) -> CosineSchedule:
    values = {"peak": 1.0, "floor": 0.2, "warmup_steps": 4, "decay_steps": 12, **shape}
    return CosineSchedule(optimizer, **values)  # type: ignore[arg-type]


def test_values(optimizer: torch.optim.AdamW) -> None:
    rate = schedule(optimizer).rate
    assert [rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(8) == pytest.approx(0.6)  # half-way down
    assert [rate(step) for step in (12, 13, 1000)] == [0.2, 0.2, 0.2]
    falling = [rate(step) for step in range(4, 13)]
    assert falling == sorted(falling, reverse=True)


def test_no_warm_up_begins_near_the_top(optimizer: torch.optim.AdamW) -> None:
    rate = schedule(optimizer, warmup_steps=0).rate
    assert 0.9 < rate(1) < 1.0


def test_a_warm_up_longer_than_the_decay_still_rises(optimizer: torch.optim.AdamW) -> None:
    rate = schedule(optimizer, warmup_steps=10, decay_steps=5).rate
    assert [rate(10), rate(11)] == [1.0, 0.2]


def test_every_group_gets_the_rate(optimizer: torch.optim.AdamW) -> None:
    plan = schedule(optimizer)
    assert plan.advance() == 0.25
    assert plan.advance() == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_it_goes_on_after_the_steps_of_its_state(optimizer: torch.optim.AdamW) -> None:
    plan, other = schedule(optimizer), schedule(optimizer)
    plan.advance()
    other.load_state_dict(plan.state_dict())
    assert other.advance() == plan.advance() == 0.5


def test_another_shape_in_the_config_counts_and_is_told(
    optimizer: torch.optim.AdamW, caplog: pytest.LogCaptureFixture
) -> None:
    plan = schedule(optimizer, peak=2.0)
    with caplog.at_level(logging.WARNING):
        plan.load_state_dict(schedule(optimizer).state_dict())
    assert plan.advance() == 0.5
    assert caplog.messages == ["the schedule's peak was 1.0 in the checkpoint and is 2.0 from now on"]


def test_matrices_decay_and_the_rest_does_not(optimizer: torch.optim.AdamW) -> None:
    decaying, others = optimizer.param_groups
    assert decaying["weight_decay"] == 0.1 and all(p.dim() >= 2 for p in decaying["params"])
    assert others["weight_decay"] == 0.0 and all(p.dim() < 2 for p in others["params"])


def test_weight_decay_of_the_config_counts_after_a_resume(
    optimizer: torch.optim.AdamW, caplog: pytest.LogCaptureFixture
) -> None:
    renew_settings(optimizer, Train(weight_decay=0.1))
    assert not caplog.messages
    renew_settings(optimizer, Train(weight_decay=0.5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert caplog.messages == ["AdamW's weight_decay was 0.1 in the checkpoint and is 0.5 from now on"]
