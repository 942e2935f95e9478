"""Tensors made of tensors: each part is stored by itself, and comes back to the bit in the target's own."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packed import Packed, PackedMomentum
from programs import run_program
from ranks import run_ranks
from strides import in_turn
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_component import (
    Checkpointer,
    CheckpointLoadError,
    CheckpointStageError,
    build_checkpointer,
    build_manager,
    load_weights,
)
from ckpt_component.config.schema import PARTS

SCRIPTS = Path(__file__).parent / "scripts"
#: What a checkpoint has beside the parts.
CONTEXT = "__tensor_unflatten__"
CALLERS = {"none": "inline", "pinned": "temporal", "shared_memory": "persistent", "zero_overhead": "persistent"}
with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="pip install torchao")


@pytest.fixture(params=["dcp", "torch_save"])
def ours(request: pytest.FixtureRequest) -> Iterator[Checkpointer]:
    overrides = [f"checkpoint/writer={request.param}", "checkpoint.load.prove=on_read"]
    with build_checkpointer("sync", overrides) as checkpointer:
        yield checkpointer


def packed(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed.of(torch.randn(shape, generator=generator).to(dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert isinstance(one, Packed) and isinstance(other, Packed)
    return all(map(torch.equal, one.parts(), other.parts()))


def pair(*values: float) -> TwoTensor:
    """A tensor of tensors that are made of tensors."""
    one, two, three, four = (torch.full((6,), value) for value in values)
    return TwoTensor(TwoTensor(one, two), TwoTensor(three, four))


class Quantized(nn.Module):
    """A layer whose weight is made of tensors, beside one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed(seed, 4, 8), requires_grad=False)
        self.bias = nn.Parameter(torch.full((4,), float(seed)))


@pytest.mark.slow
@pytest.mark.parametrize(("stager", "writer"), in_turn(itertools.product(PARTS["stager"], PARTS["writer"]), 2))
def test_every_stager_and_writer_takes_the_parts_as_they_were(stager: str, writer: str, tmp_path: Path) -> None:
    saved: dict[str, Any] = {"module": Quantized(1), "list": [packed(2, 8), torch.ones(3)], "nested": pair(1, 2, 3, 4)}
    target: dict[str, Any] = {
        "module": Quantized(7),
        "list": [packed(8, 8), torch.zeros(3)],
        "nested": pair(0, 0, 0, 0),
    }
    overrides = [f"checkpoint/stager={stager}", f"checkpoint/caller={CALLERS[stager]}", f"checkpoint/writer={writer}"]
    weight, element, nested = target["module"].weight, target["list"][0], target["nested"]
    with build_checkpointer("sync", [*overrides, "checkpoint.load.prove=on_read"]) as checkpointer:
        futures = checkpointer.save(saved, tmp_path / "one")
        if futures is not None:
            futures[0].result(60)
            for tensor in (*saved["module"].weight.parts(), *saved["list"][0].parts(), saved["nested"].a.b):
                tensor.zero_()
            futures[1].result(60)
        checkpointer.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
    assert target["module"].weight is weight and target["list"][0] is element and target["nested"] is nested
    assert same(weight, packed(1, 4, 8)) and same(element, packed(2, 8))
    assert torch.equal(target["module"].bias, torch.ones(4)) and torch.equal(target["list"][1], torch.ones(3))
    values = [part for half in (nested.a, nested.b) for part in (half.a, half.b)]
    assert all(map(torch.equal, values, [torch.full((6,), value) for value in (1.0, 2.0, 3.0, 4.0)]))


def test_without_a_target_the_parts_come_back_plain(ours: Checkpointer, tmp_path: Path) -> None:
    weight = packed(1, 8, dtype=torch.bfloat16)
    ours.save({"a": {"w": weight}}, tmp_path / "one")
    for loaded in (ours.load(tmp_path / "one")["a"]["w"], ours.load(tmp_path / "one", {"a": {}})["a"]["w"]):
        assert {type(loaded[name]) for name in ("codes", "scale", "table")} == {torch.Tensor}
        assert all(map(torch.equal, [loaded[name] for name in ("codes", "scale", "table")], weight.parts()))
        context = dict(loaded[CONTEXT])
        assert context["class"] == "packed.Packed" and context["context"] == (4, torch.bfloat16)
        assert (context["shape"], context["stride"], context["dtype"]) == ((8,), (1,), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_stock_loads_find_the_parts_by_their_keys(tmp_path: Path) -> None:
    weight = packed(1, 8)
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"w": weight}, tmp_path / "one")
    target = {"w": {"codes": torch.zeros_like(weight.codes), "scale": torch.zeros_like(weight.scale)}}
    dcp.load(target, checkpoint_id=tmp_path / "one", no_dist=True)
    assert torch.equal(target["w"]["codes"], weight.codes) and torch.equal(target["w"]["scale"], weight.scale)
    with build_checkpointer("sync", ["checkpoint/writer=torch_save"]) as checkpointer:
        checkpointer.save({"w": weight}, tmp_path / "two")
    loaded = torch.load(tmp_path / "two" / "checkpoint_0.pt", weights_only=True)
    assert torch.equal(loaded["w"]["codes"], weight.codes) and dict(loaded["w"][CONTEXT])["context"] == (
        4,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (packed(2, 4), "'w' (packed.Packed) has the shape (4,) in the target and (8,) in the checkpoint"),
        (Packed.of(torch.ones(8), block=2), "has the context (2, torch.float32) in the target and (4, torch.float32)"),
        (TwoTensor(torch.ones(8), torch.ones(8)), "has the class 'TwoTensor' in the target and 'Packed'"),
        (
            packed(2, 8, dtype=torch.float16),
            "has the dtype torch.float16 in the target and torch.float32 in the checkpoint",
        ),
        (torch.ones(8), "'w' is a plain tensor in the target, and made of tensors in the checkpoint"),
    ],
    ids=["shape", "context", "class", "dtype", "plain"],
)
def test_another_tensor_in_the_target_is_refused_by_key(
    target: torch.Tensor, said: str, ours: Checkpointer, tmp_path: Path
) -> None:
    ours.save({"v": torch.ones(2), "w": packed(1, 8)}, tmp_path / "one")
    values = {"v": torch.zeros(2), "w": target}
    with pytest.raises(CheckpointLoadError) as caught:
        ours.load(tmp_path / "one", values)
    assert said in str(caught.value) and "'w" in str(caught.value), caught.value
    assert not values["v"].any()


def test_a_plain_tensor_in_the_checkpoint_is_refused_by_key(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"module": nn.Linear(8, 4)}, tmp_path / "one")
    with pytest.raises(CheckpointLoadError) as caught:
        ours.load(tmp_path / "one", {"module": Quantized(1)})
    assert "'module.weight' is a packed.Packed, made of tensors, in the target and a tensor in the" in str(caught.value)


def test_a_tensor_that_cannot_be_taken_apart_is_refused_by_key(ours: Checkpointer, tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for value, said in (
        (
            (packed(1, 8),),
            "'a.b' holds a Packed, made of tensors, in a tuple or another object, which cannot be checkpointed; put it",
        ),
        (jagged, "'a.b' is a nested tensor, which cannot be checkpointed; save its .unbind() as a list"),
    ):
        with pytest.raises(CheckpointStageError) as caught:
            ours.save({"a": {"b": value}}, tmp_path / "one")
        assert str(caught.value).startswith(said), caught.value
        assert not (tmp_path / "one").exists()


def test_weights_load_into_a_quantized_module(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"model": Quantized(1), "step": 3}, tmp_path / "one")
    model = Quantized(2)
    load_weights(model, tmp_path / "one")
    assert same(model.weight, packed(1, 4, 8)) and torch.equal(model.bias, torch.ones(4))


def test_parts_that_are_one_tensor_are_stored_once(tmp_path: Path) -> None:
    table = torch.arange(300_000.0)
    state = {name: Packed.of(torch.full((4,), float(number)), table=table) for number, name in enumerate("abc")}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "one")
        assert sum(file.stat().st_size for file in (tmp_path / "one").iterdir()) < 2 * table.nbytes
        loaded = checkpointer.load(tmp_path / "one")
        assert loaded["a"]["table"] is loaded["c"]["table"] and torch.equal(loaded["a"]["table"], table)
        apart = {name: packed(9, 4) for name in "abc"}
        for tensor in apart.values():
            tensor.table = torch.zeros(300_000)
        checkpointer.load(tmp_path / "one", apart, strict=True)
    assert all(same(apart[name], state[name]) for name in "abc")


class Run:
    """A bfloat16 model whose optimizer keeps its state in 8 bits."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).bfloat16()
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (number + 1))
        self.optimizer = PackedMomentum(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps: range) -> list[str]:
        losses = []
        for step in steps:
            torch.manual_seed(step)
            loss = self.model(torch.randn(3, 4).bfloat16()).float().square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item().hex())
        return losses


@pytest.mark.parametrize("stepped", [0, 1])
def test_an_optimizer_makes_what_it_lacks_and_trains_on_as_before(
    stepped: int, ours: Checkpointer, tmp_path: Path
) -> None:
    run, resumed = Run(), Run()
    run.train(range(3))
    ours.save(run.state, tmp_path / "one")
    resumed.train(range(stepped))
    ours.load(tmp_path / "one", resumed.state, strict=True, allow_unexpected=False)
    assert ours.last_load is not None and {*ours.last_load.proven} == {"model", "optimizer", "scheduler"}
    for one, other in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
        saved, loaded = run.optimizer.state[one], resumed.optimizer.state[other]
        assert saved.keys() == loaded.keys() and torch.equal(saved["step"], loaded["step"])
        assert same(saved["momentum"], loaded["momentum"]) and loaded["momentum"].dtype is torch.bfloat16
    assert run.train(range(3, 7)) == resumed.train(range(3, 7))


def test_making_state_leaves_all_else_as_it_was(ours: Checkpointer, tmp_path: Path) -> None:
    run, resumed = Run(), Run()
    run.train(range(2))
    ours.save({"optimizer": run.optimizer}, tmp_path / "one")
    called = []
    resumed.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    resumed.optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before = [parameter.detach().clone() for parameter in resumed.model.parameters()]
    torch.manual_seed(5)
    ours.load(tmp_path / "one", {"optimizer": resumed.optimizer})
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3)) and not called
    assert all(map(torch.equal, before, resumed.model.parameters()))
    assert all(parameter.grad is None for parameter in resumed.model.parameters())
    assert all(state["step"] == 2 for state in resumed.optimizer.state.values())


def test_an_optimizer_that_cannot_make_its_state_is_refused_with_what_to_do(ours: Checkpointer, tmp_path: Path) -> None:
    class Closed(PackedMomentum):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if closure is None:
                raise ValueError("a closure is needed")
            super().step()

    run, resumed = Run(), Run()
    run.train(range(2))
    ours.save({"optimizer": run.optimizer}, tmp_path / "one")
    with pytest.raises(CheckpointLoadError) as caught:
        ours.load(tmp_path / "one", {"optimizer": Closed(resumed.model.parameters())})
    assert "Closed could not make its state before the first step (ValueError: a closure" in str(caught.value)
    assert str(caught.value).endswith("; take one step before the load.")
    with pytest.raises(CheckpointLoadError) as caught:
        ours.load(tmp_path / "one", {"optimizer": torch.optim.SGD(resumed.model.parameters())})
    assert "'optimizer.state.0.momentum' in the checkpoint is made of tensors" in str(caught.value)


class Delegate(torch.optim.Optimizer):
    """Hands on everything, and has nothing of its own, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Around(PackedMomentum):
    """Steps another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups[0]["params"])
        self.base = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)


def test_an_optimizer_within_another_is_never_stepped(ours: Checkpointer, tmp_path: Path) -> None:
    run, resumed, other = Run(), Run(), Run()
    run.train(range(2))
    ours.save({"model": run.model, "optimizer": run.optimizer}, tmp_path / "one")
    for each in (resumed, other):  # as a step would find it
        for parameter in each.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in other.model.parameters()]
    with pytest.raises(CheckpointLoadError, match="its attribute 'base' leads to parameters that a step would change"):
        ours.load(tmp_path / "one", {"optimizer": Around(other.optimizer)})
    assert all(map(torch.equal, before, other.model.parameters())) and not other.optimizer.state
    ours.load(tmp_path / "one", {"model": resumed.model, "optimizer": Delegate(resumed.optimizer)}, strict=True)
    assert all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))
    for one, another in zip(run.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert same(one["momentum"], another["momentum"])


class Average:
    """An object that has no state before its first update."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def test_another_object_gets_its_own_tensors_or_is_told_to_make_them(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"average": Average({"w": packed(1, 8)})}, tmp_path / "one")
    ready = Average({"w": packed(2, 8)})
    ours.load(tmp_path / "one", {"average": ready}, strict=True)
    assert same(ready.weights["w"], packed(1, 8))
    with pytest.raises(CheckpointLoadError) as caught:
        ours.load(tmp_path / "one", {"average": Average({})})
    assert "'average.weights.w' in the checkpoint is made of tensors" in str(caught.value)
    assert "let it make its state before the load" in str(caught.value)


def test_a_listing_shows_the_parts(tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"w": packed(1, 8)}, tmp_path / "one")
    done = run_program(["-m", "ckpt_component.cli", "show", str(tmp_path / "one"), "--json"], tmp_path, apart=True)
    assert done.returncode == 0, done.stderr
    shown = json.dumps(json.loads(done.stdout))
    assert all(f"w.{name}" in shown for name in ("codes", "scale", "table"))


def test_shards_are_refused_by_key_and_copies_are_stored_once(tmp_path: Path) -> None:
    said = run_ranks(SCRIPTS / "packed_ranks.py", "save", 2, tmp_path)
    assert all("'w' is a DTensor that is sharded, and its local part is a Packed" in text for text in said), said
    target = {"w": packed(9, 8)}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(tmp_path / "copies", target, strict=True, allow_unexpected=False)
    assert same(target["w"], packed(1, 8))


def test_a_guarded_optimizer_steps_while_the_parts_are_copied(tmp_path: Path) -> None:
    run = Run()
    losses = run.train(range(1))
    with build_manager("async_zero_overhead", dir=tmp_path, overrides=["checkpoint.keep.last=9"]) as manager:
        manager.guard(run.optimizer)
        for step in range(1, 6):
            manager.save(step, run.state)
            losses += run.train(range(step, step + 1))
        manager.wait()
    for step in (1, 4):
        resumed = Run()
        with build_checkpointer("sync") as checkpointer:
            checkpointer.load(tmp_path / f"iter_{step:07d}", resumed.state, strict=True)
        assert resumed.train(range(step, 6)) == losses[step:6]


@with_torchao
@pytest.mark.parametrize("kind", in_turn(["8bit", "4bit", "fp8", "int8"], 2))
def test_torchao_trains_on_after_a_kill_as_if_there_was_none(kind: str, tmp_path: Path) -> None:
    compare_with_a_killed_run(kind, tmp_path, {"TORCHDYNAMO_DISABLE": "1"})


@with_torchao
@pytest.mark.slow
def test_torchao_trains_on_compiled(tmp_path: Path) -> None:
    compare_with_a_killed_run("8bit", tmp_path, {})


def compare_with_a_killed_run(kind: str, folder: Path, env: dict[str, str]) -> None:
    def losses(name: str, *last: str) -> list[str]:
        command = [str(SCRIPTS / "low_bit.py"), str(folder / name), kind, "5", *last]
        done = run_program(command, folder, env, apart=True, timeout=300)
        assert done.returncode == (-9 if last == ("3",) else 0), done.stderr
        return [line for line in done.stdout.splitlines() if " 0x" in line]

    whole = losses("whole", "9")
    killed = losses("killed", "3")
    assert killed == whole[:3] and losses("killed") == whole[3:]
