"""What every stager must do, as tests: derive from `StagerContract`, and pytest runs them with your stager.

    class TestMine(StagerContract):
        @pytest.fixture
        def stager(self):
            return MyStager()

Tests of what happens to a snapshot later are skipped for a stager with `takes_snapshot = False`.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ...config.schema import PARTS
from ...core.image.arena import Arena
from ...errors import CheckpointStageError, CheckpointTimeoutError, CheckpointTypeError, TornSnapshotError
from ...formats.dcp import DcpWriter
from ...formats.writer import FormatPlan
from ...stagers.base import Snapshot, Stager
from .connected_parts import (
    PATIENCE_S,
    ConnectedParts,
    change,
    differences,
    example_state,
    holds_objects,
    large_state,
    registered,
    within,
)


class CountedWriter(DcpWriter):
    """Counts the plans that are made, and fails where a test says.

    Attributes:
        plans: number of calls of `plan`
        failures: errors of the next calls
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plans = 0
        self.failures: list[Exception] = []

    def plan(self, structure: Any, rank: int) -> FormatPlan:
        """Lay out one rank's files, or fail."""
        self.plans += 1
        if self.failures:
            raise self.failures.pop()
        return super().plan(structure, rank)


class StagerContract:
    """Tests of a stager. A subclass defines the fixture `stager`."""

    @pytest.fixture
    def stager(self) -> Stager:
        """A new stager with its settings, which the test connects and closes."""
        raise NotImplementedError("define a fixture `stager` that returns your stager")

    @pytest.mark.parametrize("format", PARTS["writer"])
    def test_a_snapshot_is_the_state(self, stager: Stager, format: str, tmp_path: Path) -> None:
        writer = registered("writer")[format]()
        objects = holds_objects(writer)
        with ConnectedParts(tmp_path, stager, writer) as parts:
            for number in (1, 2):
                snapshot = parts.take(example_state(number, objects=objects))
                assert not differences(parts.stored(snapshot), example_state(number, objects=objects))
                snapshot.release()

    def test_later_changes_are_not_in_a_snapshot(self, stager: Stager, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            for number in (1, 2):
                state = example_state(number)
                snapshot = parts.take(state)
                stager.wait_staged()
                change(state)
                assert not differences(parts.stored(snapshot), example_state(number))
                snapshot.release()

    def test_a_change_during_the_copy_is_not_stored(self, stager: Stager, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            state = large_state(3)
            snapshot = parts.take(state)
            change(state)
            try:
                found = parts.stored(snapshot)
            except TornSnapshotError as error:
                assert "'weight" in str(error)
            else:
                assert not differences(found, large_state(3))
            snapshot.release()
            again = parts.take(large_state(2))
            assert not differences(parts.stored(again), large_state(2))
            again.release()

    def test_a_guarded_optimizer_waits_for_the_copy(self, stager: Stager, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        weights = [torch.nn.Parameter(torch.full((1 << 18,), 1.0)) for _ in range(4)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            stager.guard(optimizer)
            stager.guard([optimizer])
            snapshot = parts.take({"weights": weights})
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert all(each.eq(1).all() for each in parts.stored(snapshot)["weights"])
            snapshot.release()
            with pytest.raises(CheckpointTypeError):
                stager.guard("optimizer")
        within(PATIENCE_S, optimizer.step)
        assert not optimizer._optimizer_step_pre_hooks, "close() left a hook at the optimizer"

    @pytest.mark.parametrize("guarded", [False, True])
    def test_forward_may_change_buffers_during_the_copy(self, stager: Stager, guarded: bool, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            if guarded:
                stager.guard(optimizer)
            for _ in (1, 2):
                expected = {key: value.clone() for key, value in model.state_dict().items()}
                snapshot = parts.take({"model": model})
                model(torch.ones(2, 4))
                assert not torch.equal(model.state_dict()["1.running_mean"], expected["1.running_mean"])
                assert not differences(parts.stored(snapshot)["model"], expected)
                snapshot.release()

    def test_a_structure_is_planned_once(self, stager: Stager, tmp_path: Path) -> None:
        writer = CountedWriter()
        with ConnectedParts(tmp_path, stager, writer) as parts:
            for number in (1, 2, 3):
                assert stager.inspect(example_state(number)).changed == (number == 1)
                parts.take(example_state(number)).release()
        assert writer.plans == 1

    def test_another_structure_is_planned_again(self, stager: Stager, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            small, large = {"weight": torch.ones(3)}, {"weight": torch.full((5, 1000), 2.0), "more": torch.zeros(7)}
            for state in (small, large, small):
                assert stager.inspect(state).changed
                snapshot = parts.take(state)
                assert not differences(parts.stored(snapshot), state)
                snapshot.release()

    def test_each_save_has_its_memory_for_itself(self, stager: Stager, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            taken = []
            for number in range(1, 20):
                try:
                    taken.append(parts.take(example_state(number), wait_s=0))
                except CheckpointTimeoutError:
                    assert stager.busy and not stager.wait_free(time.monotonic())
                    break
                stager.wait_staged()
            for number, snapshot in enumerate(taken, 1):
                assert not differences(parts.stored(snapshot), example_state(number))
                snapshot.release()

    def test_memory_that_is_released_is_used_again(self, stager: Stager, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            held = 0
            for number in range(1, 21):
                snapshot = parts.take(example_state(number), wait_s=PATIENCE_S if number == 1 else 1)
                snapshot.staged.result(PATIENCE_S)
                snapshot.release()
                snapshot.release()
                assert not stager.busy
                held = held or stager.host_bytes
                assert stager.host_bytes <= max(held, 1) * 17, "each save takes more memory"
            one, two = parts.take(example_state(30)), None
            with contextlib.suppress(CheckpointTimeoutError):
                two = parts.take(example_state(31), wait_s=0)
            for number, each in ((30, one), (31, two)):
                if each is not None and stager.takes_snapshot:
                    assert not differences(parts.stored(each), example_state(number)), "released twice, leased twice"
                if each is not None:
                    each.release()

    def test_a_save_waits_for_memory_that_another_thread_releases(self, stager: Stager, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            taken = list[Snapshot]()
            while not stager.busy and len(taken) < 17:
                taken.append(parts.take(example_state(1)))
            timers = [threading.Timer(0.05, each.release) for each in taken]
            for timer in timers:
                timer.start()
            assert within(PATIENCE_S, lambda: stager.wait_free(time.monotonic() + PATIENCE_S))
            snapshot = parts.take(example_state(2))
            assert not differences(parts.stored(snapshot), example_state(2))
            snapshot.release()
            for timer in timers:
                timer.join()

    def test_a_save_may_be_given_up_during_its_copy(self, stager: Stager, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            for number in range(1, 8):
                parts.take(large_state(number), wait_s=2).release()
            snapshot = parts.take(large_state(9), wait_s=2)
            assert not differences(parts.stored(snapshot), large_state(9))
            snapshot.release()

    def test_a_value_that_cannot_be_saved_is_named(self, stager: Stager, tmp_path: Path) -> None:
        bad: list[Mapping[str, Any]] = [
            {"layer": {"indices": torch.eye(3).to_sparse()}},
            {"layer": {"indices": object()}},
        ]
        with ConnectedParts(tmp_path, stager, DcpWriter()) as parts:
            for state in bad * 10:
                with pytest.raises(CheckpointStageError, match=r"'layer\.indices'"):
                    parts.take(state, wait_s=1)
            snapshot = parts.take(example_state(1), wait_s=1)
            assert not differences(parts.stored(snapshot), example_state(1))
            snapshot.release()

    def test_a_plan_that_fails_is_made_again(self, stager: Stager, tmp_path: Path) -> None:
        writer = CountedWriter()
        with ConnectedParts(tmp_path, stager, writer) as parts:
            for state in (example_state(1), {"weight": torch.ones(3)}):
                writer.failures.append(CheckpointStageError("this structure does not fit"))
                with pytest.raises(CheckpointStageError, match="does not fit"):
                    parts.take(state)
                snapshot = parts.take(state, wait_s=1)
                assert not differences(parts.stored(snapshot), state)
                snapshot.release()

    def test_another_process_sees_the_image(self, stager: Stager, tmp_path: Path) -> None:
        self._needs_snapshots(stager)
        with ConnectedParts(tmp_path, stager, DcpWriter(), shared=True) as parts:
            snapshot = parts.take(example_state(1))
            snapshot.staged.result(PATIENCE_S)
            source, size = snapshot.source, snapshot.layout.arena_bytes
            assert isinstance(source, Arena), "a source that is not an Arena can be written with caller=inline only"
            with mmap.mmap(source.shared_descriptor(), source.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
                assert seen[:size] == b"".join(source.buffers(0, size))[:size]
            del source
            snapshot.release()

    def test_memory_made_in_advance_is_that_of_the_first_save(self, stager: Stager, tmp_path: Path) -> None:
        writer = CountedWriter()
        with ConnectedParts(tmp_path, stager, writer, shared=stager.takes_snapshot) as parts:
            stager.reserve(example_state(1))
            stager.reserve(example_state(1))
            stager.prewarm(stager.inspect(example_state(1)))
            plans, held = writer.plans, stager.host_bytes
            snapshot = parts.take(example_state(2), wait_s=1)
            assert not differences(parts.stored(snapshot), example_state(2))
            assert (writer.plans, stager.host_bytes) == (plans, held)
            snapshot.release()

    def test_close_is_quick_and_may_be_repeated(self, stager: Stager, tmp_path: Path) -> None:
        shared = stager.takes_snapshot
        with ConnectedParts(tmp_path, stager, DcpWriter(), shared=shared) as parts:
            stager.reserve(example_state(1))
            parts.take(example_state(1)).release()
            within(PATIENCE_S, stager.close)
            within(PATIENCE_S, stager.close)
            assert stager.host_bytes == 0

    def test_close_spares_the_snapshot_of_a_running_save(self, stager: Stager, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, stager, DcpWriter(), shared=stager.takes_snapshot) as parts:
            snapshot = parts.take(example_state(1))
            within(PATIENCE_S, stager.close)
            assert not differences(parts.stored(snapshot), example_state(1))
            snapshot.release()
            assert stager.host_bytes == 0

    @staticmethod
    def _needs_snapshots(stager: Stager) -> None:
        if not stager.takes_snapshot:
            pytest.skip("this stager takes no snapshot: the trainer waits for the write")
