"""The memory of the first save is made while training runs, by the states of a few of the steps before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ckpt_component import CheckpointStageError
from ckpt_component.saving.pipeline import Prewarmer
from ckpt_component.stagers.base import Snapshot, Stager, StatePlan


class Memory(Stager):
    """Notes for which steps it is made; fails from `bad` on."""

    def __init__(self, bad: int) -> None:
        self.steps: list[int] = []
        self._bad = bad

    def take(self, plan: StatePlan) -> Snapshot:
        raise NotImplementedError

    def reserve(self, state_dict: Mapping[Any, Any]) -> None:
        self.steps.append(state_dict["step"])
        if state_dict["step"] >= self._bad:
            raise CheckpointStageError("a lock cannot be saved")


@pytest.mark.parametrize(("bad", "steps"), [(100, [1, 2, 4, 8, 16]), (4, [1, 2, 4])])
def test_memory_is_made_at_steps_that_double_until_one_cannot_be_saved(
    bad: int, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    stager = Memory(bad)
    prewarmer = Prewarmer(stager)
    for step in range(1, 21):
        prewarmer.look({"step": step})
    assert stager.steps == steps
    assert caplog.text.count("the first save will fail, unless the state changes") == (bad == 4)
