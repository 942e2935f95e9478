"""When copies are awaited after all: by the figures that the watch is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ckpt_component import AsyncCheckpointer, build_checkpointer
from ckpt_component.stagers.overlap import OverlapMonitor

GB = 1_000_000_000


class Loop:
    """A training loop with a clock of its own; every 12th step has a copy beside it, which makes it slower."""

    def __init__(self, watch: OverlapMonitor, slower: float) -> None:
        self.watch, self.slower, self.now = watch, slower, 0.0

    def run(self, saves: int) -> None:
        for _ in range(saves):
            for step in range(12):
                self.now += 0.1
                if step == 11:
                    self.watch.began(GB)
                    self.now += self.slower
                self.watch.stepped(self.now)


@pytest.mark.parametrize(("slower", "awaits"), [(0.2, False), (0.7, True)])
def test_overlap_that_costs_more_than_waiting_is_given_up_and_said_once(
    slower: float, awaits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = OverlapMonitor()
    watch.awaited(0.4)
    loop = Loop(watch, slower)
    loop.run(2)
    assert not watch.awaits
    loop.run(5)
    assert watch.awaits == awaits
    assert caplog.text.count("copies are awaited from now on") == awaits


def test_a_trial_is_asked_for_only_when_overlap_looks_dear() -> None:
    cheap, dear = OverlapMonitor(), OverlapMonitor()
    Loop(cheap, 0.3).run(4)
    Loop(dear, 0.7).run(4)
    assert not cheap.wants_trial and dear.wants_trial
    dear.awaited(0.6)
    assert not dear.wants_trial and not dear.awaits


def test_awaited_copies_are_whole_when_save_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with build_checkpointer("async_zero_overhead") as ours:
        assert isinstance(ours, AsyncCheckpointer)
        ours.guard(optimizer)
        ours.saver.stager._overlap.awaits = True
        stage, write = ours.save({"weight": weight}, tmp_path / "one")
        assert stage.done()
        with torch.no_grad():
            weight.fill_(7)
        write.result(30)
        assert ours.load(tmp_path / "one")["weight"].eq(0).all()
