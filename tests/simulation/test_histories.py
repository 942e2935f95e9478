"""Any history of saves, faults, power cuts, damage, commands and runs leaves in the folder what was acknowledged."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from evidence import Record
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulation.frozen_history import CHANGES, FrozenHistory
from simulation.history import LONG, Event, History
from simulation.world import one_thread

from ckpt_component.testing import Fault

FAULTS = [Fault("fail"), Fault("fail", errno.ENOSPC), Fault("lost")]
AFTER = st.integers(0, 10) | st.integers(11, 60)
CUTS = st.builds(
    Event,
    fault=st.just(Fault("cut")),
    after=AFTER,
    seed=st.integers(0, 1000),
    pause=st.sampled_from([0.0, 10.0, float(LONG)]),
)
EVENTS = st.one_of(st.none(), CUTS, st.builds(Event, fault=st.sampled_from(FAULTS), after=AFTER))
LOSSES = st.lists(st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=4)


class Histories(RuleBasedStateMachine):
    """Rules are what may happen next."""

    history: History

    @initialize(
        protocol=st.sampled_from(["rename", "manifest"]),
        last=st.integers(1, 3),
        every=st.sampled_from([None, 4]),
        best=st.booleans(),
    )
    def make_folder(self, protocol: str, last: int, every: int | None, best: bool) -> None:
        self.history = History(protocol, last, every, best)

    @rule(which=st.integers(0, 1), losses=LOSSES, event=EVENTS)
    def train(self, which: int, losses: list[float], event: Event | None) -> None:
        """Save some steps; something happens in the save of the last one."""
        history = self.history
        if not history.runs:
            history.begin("auto", False, None)
        for number, loss in enumerate(losses, 1):
            if history.runs:
                history.save(history.runs[which % len(history.runs)], 1, loss, event if number == len(losses) else None)

    @rule(losses=LOSSES, event=EVENTS, ends=st.booleans())
    def start(self, losses: list[float], event: Event | None, ends: bool) -> None:
        """Start a run, after those that are there or beside them; something happens in its restore."""
        history = self.history
        if ends or len(history.runs) > 1:
            history.end(None)
        history.begin("auto", False, event)
        for loss in losses:
            if history.runs:
                history.save(history.runs[-1], 2, loss, None)

    @precondition(lambda self: self.history.listed)
    @rule(data=st.data(), rewind=st.sampled_from([True, True, False]), event=EVENTS)
    def go_back(self, data: st.DataObject, rewind: bool, event: Event | None) -> None:
        """Start a run from an older step, or from scratch."""
        self.history.end(None)
        choices: list[str | int] = ["never", *self.history.listed]
        choice = data.draw(st.sampled_from(choices))
        self.history.begin(choice, rewind, event)

    @rule(event=EVENTS, seconds=st.sampled_from([0, 30, 120]))
    def end(self, event: Event | None, seconds: int) -> None:
        self.history.end(event)
        self.history.disk.now += seconds

    @precondition(lambda self: {*self.history.listed} - self.history.flipped)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        steps = sorted({*self.history.listed} - self.history.flipped)
        self.history.flip(data.draw(st.sampled_from(steps)))

    @precondition(lambda self: {*self.history.listed} - self.history.flipped)
    @rule(data=st.data(), command=st.sampled_from(["gc", "rm", "cp"]), event=EVENTS)
    def command(self, data: st.DataObject, command: str, event: Event | None) -> None:
        steps = sorted({*self.history.listed} - self.history.flipped)
        if command == "gc":
            self.history.collect(event)
        else:
            step = data.draw(st.sampled_from(steps))
            (self.history.delete if command == "rm" else self.history.copy)(step, event)

    @invariant()
    def holds_what_was_acknowledged(self) -> None:
        self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.finish()


class FrozenHistories(Histories):
    """The same with frozen weights, whose files checkpoints share."""

    history: FrozenHistory

    @initialize(
        protocol=st.sampled_from(["rename", "manifest"]),
        last=st.integers(1, 3),
        best=st.booleans(),
        declared=st.booleans(),
        stager=st.sampled_from(["none", "shared_memory", "zero_overhead"]),
    )
    def make_folder(self, protocol: str, last: int, best: bool, declared: bool, stager: str) -> None:
        self.history = FrozenHistory(protocol, last, None, best, declared=declared, stager=stager)

    @rule(which=st.integers(0, len(CHANGES) - 1), name=st.integers(0, 4))
    def change(self, which: int, name: int) -> None:
        self.history.change(which, f"layer{name}")


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """A history is the same whenever it happens: the names of attempts, the order of operations, and the time."""
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        # pytest keeps what is logged, with it the errors, their frames, and so the files of all histories.
        logger = logging.getLogger("ckpt_component")
        patch.setattr(logger, "handlers", [logging.NullHandler()])
        patch.setattr(logger, "propagate", False)
        yield


def explore(machine: type[Histories], examples: int, steps: int, folder: Path) -> None:
    """Try histories.

    Args:
        machine: what may happen
        examples: how many
        steps: rules in each
        folder: where hypothesis may write
    """
    set_hypothesis_home_dir(folder)
    with alike():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=True,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.slow
@pytest.mark.timeout(600)  # 10 s of CPU
@pytest.mark.parametrize(
    ("machine", "examples"), [(Histories, 10), pytest.param(FrozenHistories, 10, marks=pytest.mark.slow)]
)
def test_any_history(machine: type[Histories], examples: int, tmp_path: Path, record_property: Record) -> None:
    explore(machine, examples, 12, tmp_path)
    record_property("histories", examples)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)  # a quarter of an hour, if nothing else runs
@pytest.mark.parametrize(("machine", "examples"), [(Histories, 2000), (FrozenHistories, 1000)])
def test_any_long_history(machine: type[Histories], examples: int, tmp_path: Path, record_property: Record) -> None:
    explore(machine, examples, 30, tmp_path)
    record_property("histories", examples)
