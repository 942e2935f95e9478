"""`keep`: which checkpoints stay, as plain numbers."""

from __future__ import annotations

import math

import pytest

from ckpt_component.core.commit.cleanup import BestPolicy, RetentionPolicy


@pytest.mark.parametrize(
    ("policy", "committed", "deleted", "newest"),
    [
        (RetentionPolicy(last=1), [1, 2, 3], [1, 2], [3]),
        (RetentionPolicy(last=2), [3, 1, 2], [1], [2, 3]),
        (RetentionPolicy(last=3), [1, 2, 3], [], [1, 2, 3]),
        (RetentionPolicy(last=0), [1, 2, 3], [1, 2], [3]),  # the newest stays in any case
        (RetentionPolicy(last=1, every_steps=2), [1, 2, 3, 4, 5], [1, 3], [5]),
        (RetentionPolicy(last=None), [1, 2], [], []),
        (RetentionPolicy(last=1), [], [], []),
    ],
)
def test_the_newest_and_some_forever(
    policy: RetentionPolicy, committed: list[int], deleted: list[int], newest: list[int]
) -> None:
    assert policy.to_delete(committed) == deleted
    assert policy.newest(committed) == newest


def test_the_best_stay_as_well() -> None:
    assert RetentionPolicy(last=1).to_delete([1, 2, 3, 4], best=[2, 3]) == [1]


def test_the_best_first_of_equals_the_first_and_nan_never() -> None:
    metrics = {1: {"a": 3.0}, 2: {"a": 1.0}, 3: {"b": 0.0}, 4: {"a": math.nan}, 5: {"a": 1.0, "b": 1.0}}
    assert BestPolicy("a").ranked(metrics) == [2, 5, 1]
    assert BestPolicy("a", largest=True).ranked(metrics) == [1, 2, 5]
    assert BestPolicy("a").last == 1


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"loss": 1.0}, None),
        ({"loss": math.nan}, "its metric 'loss' is NaN"),
        ({}, "it has no metric 'loss'"),
        ({"lss": 1.0}, "it has no metric 'loss' (did you mean checkpoint.keep.best.metric=lss?)"),
        ({"b": 1.0, "a": 1.0}, "it has no metric 'loss', only 'a', 'b'"),
    ],
)
def test_why_a_checkpoint_is_never_the_best(metrics: dict[str, float], why: str | None) -> None:
    assert BestPolicy("loss").why_never(metrics) == why
