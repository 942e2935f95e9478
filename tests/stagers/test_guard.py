"""What `guard` takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointError, CheckpointManager, build_manager


class Wrapper(torch.optim.Optimizer):
    """Derives from torch's class, and never calls its constructor, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with build_manager("async_zero_overhead", dir=tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("wrap", "count"),
    [
        (lambda one, two: one, 1),
        (lambda one, two: [one, two], 2),
        (lambda one, two: (one, one), 1),
        (lambda one, two: {"a": one, "b": two}, 2),
        (lambda one, two: Wrapper(one), 1),
        (lambda one, two: SimpleNamespace(optimizer=Wrapper(one)), 1),
        (lambda one, two: SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=one), two]), 2),
    ],
    ids=["one", "list", "twice", "dict", "subclass", "nested", "chained"],
)
def test_it_guards_every_optimizer_inside(manager: CheckpointManager, wrap: Any, count: int) -> None:
    one, two = optimizer(), optimizer()
    manager.guard(wrap(one, two))
    assert sum(len(each._optimizer_step_pre_hooks) for each in (one, two)) == count


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "a NoneType"),
        ([], "an empty list"),
        (torch.nn.Linear(1, 1), "a Linear"),
        ([optimizer(), 3], "a int"),
        (torch.optim.SGD, "the class SGD"),
        (SimpleNamespace(optimizer="adam"), "a str"),
    ],
    ids=["none", "empty", "module", "number", "class", "wrapper"],
)
@pytest.mark.parametrize("preset", ["async_zero_overhead", "async_persistent"])
def test_anything_else_is_a_type_error_that_says_what_to_pass(
    tmp_path: Path, preset: str, given: Any, named: str
) -> None:
    with build_manager(preset, dir=tmp_path) as manager, pytest.raises(CheckpointError) as caught:
        manager.guard(given)
    assert isinstance(caught.value, TypeError)
    assert named in str(caught.value) and "guard(optimizer)" in str(caught.value)


def test_more_arenas_than_there_is_memory_for_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=40_000_000))
    with build_manager("async_persistent", ["checkpoint.stager.arenas=10"], dir=tmp_path) as manager:
        manager.save(1, {"w": torch.zeros(2_000_000)})
    assert "checkpoint.stager.arenas=10 may take 0.08 GB of memory" in caplog.text and "use 4" in caplog.text
