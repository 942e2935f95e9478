from __future__ import annotations

from typing import Any

import pytest
import torch
from ckpt_train.model import Gpt
from ckpt_train.schedule import build_optimizer, learning_rate, use_settings
from ckpt_train.schema import Model, Train


@pytest.fixture
def optimizer() -> torch.optim.AdamW:
    return build_optimizer(Gpt(Model(layers=1, heads=1, width=8, context=4)), Train(lr=1.0, weight_decay=0.1))


def rates(*steps: int, **shape: Any) -> list[float]:
    settings = Train(**{"lr": 1.0, "min_lr_ratio": 0.2, "warmup_steps": 4, "decay_steps": 12, **shape})
    return [learning_rate(step, settings) for step in steps]


def test_values() -> None:
    assert rates(1, 2, 3, 4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(8) == [pytest.approx(0.6)]  # half-way down
    assert rates(12, 13, 1000) == [0.2, 0.2, 0.2]
    falling = rates(*range(4, 13))
    assert falling == sorted(falling, reverse=True)


def test_no_warm_up_begins_near_the_top() -> None:
    assert 0.9 < rates(1, warmup_steps=0)[0] < 1.0


def test_a_warm_up_longer_than_the_decay_still_rises() -> None:
    assert rates(10, 11, warmup_steps=10, decay_steps=5) == [1.0, 0.2]


def test_matrices_decay_and_the_rest_does_not(optimizer: torch.optim.AdamW) -> None:
    decaying, others = optimizer.param_groups
    assert decaying["weight_decay"] == 0.1 and all(p.dim() >= 2 for p in decaying["params"])
    assert others["weight_decay"] == 0.0 and all(p.dim() < 2 for p in others["params"])


def test_the_config_counts_in_every_step(optimizer: torch.optim.AdamW) -> None:
    rate = use_settings(optimizer, 2, Train(lr=2.0, warmup_steps=4, weight_decay=0.5))
    assert rate == 1.0 and [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
