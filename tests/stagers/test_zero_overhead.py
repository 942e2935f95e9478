"""The fence: no optimizer step under a copy, buffers first, and a torn snapshot fails by key."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import AsyncCheckpointer, TornSnapshotError, build_checkpointer
from ckpt_component.testing import faults


class SlowCopies:
    """Holds copies back until they are let go; not those that are done before `save` returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpt_component.core.image.copy import CopyTasks
        from ckpt_component.stagers.zero_overhead import ZeroOverheadStager

        self.go = threading.Event()
        self.helped = False
        drain, take = CopyTasks.drain, ZeroOverheadStager.take
        taking = threading.local()

        def slow_drain(tasks: CopyTasks, until: float = math.inf, threads: int = 1) -> None:
            if not getattr(taking, "now", False):
                self.helped |= threading.current_thread() is threading.main_thread()
                assert self.go.wait(30)
            drain(tasks, until, threads)

        def quick_take(stager: ZeroOverheadStager, plan: Any) -> Any:
            taking.now = True
            try:
                return take(stager, plan)
            finally:
                taking.now = False

        monkeypatch.setattr(CopyTasks, "drain", slow_drain)
        monkeypatch.setattr(ZeroOverheadStager, "take", quick_take)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_forward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).sum().backward()


def checkpointer() -> AsyncCheckpointer:
    built = build_checkpointer("async_zero_overhead")
    assert isinstance(built, AsyncCheckpointer)
    return built


def test_forward_and_backward_go_on_and_the_step_waits(slow: SlowCopies, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    train_forward(model, optimizer)
    optimizer.step()
    with checkpointer() as ours:
        ours.guard(optimizer)
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        stage, write = ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
        assert not stage.done()
        train_forward(model, optimizer)  # changes BatchNorm's buffers under the copy
        assert not stage.done()
        threading.Timer(0.2, slow.go.set).start()
        optimizer.step()
        assert stage.done()
        assert slow.helped  # whoever waits for the copy takes part in it
        write.result(30)
        loaded = ours.load(tmp_path / "one")["model"]
        assert all(torch.equal(loaded[key], value) for key, value in expected.items())
        assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])


def test_a_tensor_that_changes_under_the_copy_fails_the_save_by_name(slow: SlowCopies, tmp_path: Path) -> None:
    state = {"weight": torch.ones(5), "other": torch.ones(5)}
    with checkpointer() as ours:
        stage, write = ours.save(state, tmp_path / "one")
        state["weight"].add_(1)
        slow.go.set()
        with pytest.raises(TornSnapshotError, match=r"'weight' changed before"):
            write.result(30)
        with pytest.raises(TornSnapshotError):
            stage.result(30)
        ours.save(state, tmp_path / "two")
        ours.wait_staged()
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


@pytest.mark.parametrize("has_fence", [False, True])
def test_an_operation_that_ran_when_the_copy_ended_fails_the_save_by_name(has_fence: bool, tmp_path: Path) -> None:
    state = {"weight": torch.ones(5)}
    with checkpointer() as ours:
        with faults.at("write").holds() as held:
            _, write = ours.save(state, tmp_path / "one")
            held.wait()
            torch.autograd.graph.increment_version(state["weight"])  # as an operation does when it ends
            if has_fence:
                ours.wait_staged()
        with pytest.raises(TornSnapshotError, match=r"'weight' changed before"):
            write.result(30)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_in_the_state_is_guarded_by_itself(how: dict[str, bool], slow: SlowCopies, tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0, **how)  # with fused=True no version tells of its steps
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with checkpointer() as ours:
        stage, write = ours.save({"weights": weights, "optimizer": optimizer}, tmp_path / "one")
        assert not stage.done()
        threading.Timer(0.1, slow.go.set).start()
        optimizer.step()
        assert stage.done()
        write.result(30)
        assert all(weight.eq(1).all() for weight in ours.load(tmp_path / "one")["weights"])
    assert not optimizer._optimizer_step_pre_hooks


def test_optimizers_that_a_script_replaces_are_let_go(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with checkpointer() as ours:
        for number in range(3):
            train_forward(model, optimizer)
            optimizer.step()
            expected = {key: value.clone() for key, value in model.state_dict().items()}
            ours.save({"model": model, "optimizer": optimizer}, tmp_path / str(number))
            old, optimizer = weakref.ref(optimizer), torch.optim.AdamW(model.parameters(), lr=0.1)
            ours.wait()
            loaded = ours.load(tmp_path / str(number))["model"]
            assert all(torch.equal(loaded[key], value) for key, value in expected.items())
            gc.collect()
            assert old() is None


def until_done(stage: Future[None]) -> None:
    while not stage.done():
        time.sleep(0.001)


@pytest.mark.parametrize(
    "wait",
    [
        lambda ours, stage: ours.wait_staged(),
        lambda ours, stage: stage.result(30),
        lambda ours, stage: stage.exception(30),
        lambda ours, stage: until_done(stage),
    ],
    ids=["wait_staged", "result", "exception", "done"],
)
def test_whoever_has_waited_for_the_copy_may_change_the_state(
    wait: Callable[[AsyncCheckpointer, Future[None]], None], tmp_path: Path
) -> None:
    state = {"weight": torch.ones(5)}
    with checkpointer() as ours:
        with faults.at("write").holds() as held:
            stage, write = ours.save(state, tmp_path / "one")
            wait(ours, stage)
            state["weight"].zero_()
            held.wait()
        write.result(30)
        assert ours.load(tmp_path / "one")["weight"].eq(1).all()


def test_tensors_that_are_made_anew_for_every_save_are_all_the_same_saved(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with checkpointer() as ours:
        ours.guard(optimizer)
        for number in range(4):
            train_forward(model, optimizer)
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "made": torch.full((9,), float(number))}
            expected = {key: value.clone() for key, value in model.state_dict().items()}
            if number == 2:
                weight = model.get_parameter("0.weight")
                weight.data = weight.data.clone()  # it lies somewhere else now
            ours.save(state, tmp_path / str(number))[1].result(30)
            loaded = ours.load(tmp_path / str(number))
            assert loaded["made"].eq(number).all()
            assert all(torch.equal(loaded["model"][key], value) for key, value in expected.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preset", ["async_zero_overhead", "async_persistent"])
def test_cuda_tensors_are_copied_after_the_work_that_makes_them(preset: str, tmp_path: Path) -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    overrides = ["checkpoint/stager=pinned"] if preset == "async_persistent" else []
    with build_checkpointer(preset, overrides) as ours:
        for _ in range(100):
            weight.add_(1)  # queued on the trainer's stream, not yet done when save is called
        _, write = ours.save({"weight": weight}, tmp_path / "one")  # type: ignore[misc]
        ours.wait_staged()
        weight.zero_()
        write.result(60)
        assert ours.load(tmp_path / "one")["weight"].eq(100).all()
