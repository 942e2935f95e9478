"""What an optimizer gets back: by name, as it was saved, and what is said where that is not all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_component import CheckpointCorruptError, Checkpointer, CheckpointLoadError, build_checkpointer

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def ours() -> Iterator[Checkpointer]:
    overrides = ["checkpoint.durability=process_crash", "checkpoint.load.prove=on_read"]
    with build_checkpointer("sync", overrides) as checkpointer:
        yield checkpointer


class Layers(nn.Module):
    """Square layers of one shape, so that state can go to the wrong one."""

    def __init__(self, names: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(4, 4, bias=False, dtype=dtype)
            with torch.no_grad():
                layer.weight.copy_(torch.arange(16.0).view(4, 4) / 32 + ord(name) - ord("a"))
            self.add_module(name, layer)

    def of(self, names: str) -> list[nn.Parameter]:
        return [self.get_parameter(f"{name}.weight") for name in names]


def train(model: Layers, optimizer: torch.optim.Optimizer, steps: int = 2, names: str = "") -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name[0] in (names or name):
                parameter.grad = torch.full_like(parameter, ord(name[0]) - ord("a") + 1 + step)
        optimizer.step()


def state_of(model: Layers, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.keys() == other[name].keys(), name
        for key, value in values.items():
            got = other[name][key]
            assert type(got) is type(value), (name, key)
            if isinstance(value, torch.Tensor):
                assert got.dtype == value.dtype and torch.equal(got, value), (name, key)
            else:
                assert got == value, (name, key)


def muon(params: Any) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    return torch.optim.Muon(params, lr=0.01)


def adafactor(params: Any) -> torch.optim.Optimizer:
    optimization = pytest.importorskip("transformers.optimization")
    optimizer: torch.optim.Optimizer = optimization.Adafactor(params, beta1=0.9, relative_step=False, lr=0.01)
    return optimizer


def schedule_free(params: Any) -> torch.optim.Optimizer:
    schedulefree = pytest.importorskip("schedulefree")
    optimizer: Any = schedulefree.AdamWScheduleFree(params, lr=0.01, warmup_steps=3)
    optimizer.train()
    made: torch.optim.Optimizer = optimizer
    return made


OPTIMIZERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True, amsgrad=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW with a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "Adafactor of torch": torch.optim.Adafactor,
    "Adafactor of transformers": adafactor,
    "Muon": muon,
    "schedule-free": schedule_free,
}


@pytest.mark.parametrize("stepped", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_comes_back_to_its_parameter_as_it_was(
    name: str, dtype: torch.dtype, stepped: int, ours: Checkpointer, tmp_path: Path
) -> None:
    model, other = Layers("abc", dtype), Layers("cab", dtype)
    optimizer, restored = OPTIMIZERS[name](model.of("abc")), OPTIMIZERS[name](other.of("bca"))
    train(model, optimizer)
    train(other, restored, stepped)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    train(model, optimizer, 3)
    train(other, restored, 3)
    assert all(map(torch.equal, model.of("abc"), other.of("abc")))
    assert ours.last_load is not None and {*ours.last_load.proven} == {"model", "optimizer"}


def test_a_tensor_as_lr_comes_back_in_dtype_and_value(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("a"), Layers("a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25, dtype=torch.float64), foreach=False)
    restored = torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.5, dtype=torch.float64), foreach=False)
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored})
    rate = restored.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) and rate.dtype == torch.float64 and rate.item() == 0.25


def groups_of(model: Layers, groups: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"params": model.of(names), "lr": lr} for names, lr in groups]


def test_a_group_that_was_split_gives_its_options_to_both_parts(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("abc"), Layers("abc")
    optimizer = torch.optim.AdamW(groups_of(model, [("ab", 0.1), ("c", 0.2)]))
    restored = torch.optim.AdamW(groups_of(other, [("c", 9), ("b", 9), ("a", 9)]))
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True, allow_unexpected=False)
    assert [group["lr"] for group in restored.param_groups] == [0.2, 0.1, 0.1]
    assert_same_state(state_of(model, optimizer), state_of(other, restored))


def test_groups_that_became_one_give_it_the_options_that_they_share(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("abc"), Layers("abc")
    optimizer = torch.optim.AdamW(groups_of(model, [("a", 0.1), ("b", 0.1), ("c", 0.2)]))
    restored = torch.optim.AdamW(groups_of(other, [("c", 9), ("ba", 9)]))
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    assert [group["lr"] for group in restored.param_groups] == [0.2, 0.1]
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    torn = torch.optim.AdamW(groups_of(other, [("abc", 9)]))
    text = r"Group 0 of 'optimizer' .* 'optimizer.param_groups.0' with lr=0.1 and .* 'optimizer.param_groups.2' with lr=0.2"
    with pytest.raises(CheckpointLoadError, match=text):
        ours.load(tmp_path / "one", {"model": other, "optimizer": torn})
    ours.load(tmp_path / "one", {"model": other, "optimizer": torn}, ignore=["optimizer.param_groups.*.lr"])
    assert torn.param_groups[0]["lr"] == 9
    assert_same_state(state_of(model, optimizer), state_of(other, torn))


def test_a_scheduler_follows_the_groups(ours: Checkpointer, tmp_path: Path) -> None:
    def run(groups: Sequence[tuple[str, float]]) -> tuple[Layers, Any, Any]:
        model = Layers("ab")
        optimizer = torch.optim.SGD(groups_of(model, groups), momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model, optimizer, scheduler = run([("a", 0.1), ("b", 0.4)])
    train(model, optimizer)
    scheduler.step()
    ours.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "one")
    other, restored, its = run([("b", 7), ("a", 8)])
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored, "scheduler": its})
    assert its.base_lrs == [0.4, 0.1] and its.get_last_lr() == [0.2, 0.05]
    for model_, optimizer_, scheduler_ in ((model, optimizer, scheduler), (other, restored, its)):
        train(model_, optimizer_)
        scheduler_.step()
    assert its.get_last_lr() == [0.1, 0.025]
    assert all(map(torch.equal, model.of("ab"), other.of("ab")))


def test_parameters_without_saved_state_and_state_without_parameter_are_named(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Layers("abc"), Layers("abc")
    optimizer, restored = torch.optim.AdamW(model.of("ab")), torch.optim.AdamW(other.of("bc"))
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    train(other, restored, 1)
    caplog.clear()
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    said = [record.getMessage() for record in caplog.records]
    assert "'optimizer': the checkpoint has no state of model.c.weight, which begins without" in said
    assert "'optimizer': nothing in the target takes the saved state of model.a.weight" in said
    assert not state_of(other, restored)["c.weight"]
    assert_same_state(
        {"b.weight": state_of(model, optimizer)["b.weight"]}, {"b.weight": restored.state[other.of("b")[0]]}
    )


def test_names_of_the_optimizer_serve_where_no_module_is_in_the_state(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("ab"), Layers("ba")
    if "param_names" not in torch.optim.AdamW([("a", model.of("a")[0])]).param_groups[0]:
        pytest.skip("torch has named parameters from 2.6 on")
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    restored = torch.optim.AdamW(list(other.named_parameters()))
    train(model, optimizer)
    ours.save({"optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    assert restored.param_groups[0]["param_names"] == ["b.weight", "a.weight"]


def test_the_tensors_of_a_plain_state_dict_give_names_too(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("ab"), Layers("ba")
    optimizer, restored = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    train(model, optimizer)
    ours.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other.state_dict(), "optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))


@pytest.mark.parametrize("stepped", [0, 1])
@pytest.mark.parametrize("with_stock_dcp", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_that_torch_stored_by_name_goes_to_the_names(
    with_stock_dcp: bool, stepped: int, ours: Checkpointer, tmp_path: Path
) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, other = Layers("abc"), Layers("cab")
    groups = [{"params": model.of("ac"), "lr": 0.25}, {"params": model.of("b"), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, names="ab")
    weights, moments = get_state_dict(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    stored, path = {"nested": {"model": weights}, "optimizer": moments}, str(tmp_path / "saved")
    if with_stock_dcp:
        checkpoint.save(stored, checkpoint_id=path, no_dist=True)
    else:
        ours.save(stored, path)
    restored = torch.optim.AdamW([{"params": other.of("b")}, {"params": other.of("ca")}])
    train(other, restored, stepped)
    ours.load(path, {"nested": {"model": other}, "optimizer": restored})
    expected = state_of(model, optimizer)
    assert_same_state(state_of(other, restored), expected)
    assert [group["lr"] for group in restored.param_groups] == [0.5, 0.25]


def test_where_names_are_missing_one_line_says_that_order_was_not_checked(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Layers("ab"), Layers("ab")
    optimizer, restored = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    ours.load(tmp_path / "one.pt", {"model": other, "optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    assert caplog.text.count("'optimizer' is loaded by position, and the order of its parameters was not checked") == 1
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "two")
    caplog.clear()
    ours.load(tmp_path / "two", {"model": other, "optimizer": restored}, strict=True)
    assert "by position" not in caplog.text


def test_a_renamed_module_keeps_its_optimizer_state(ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("ab"), Layers("ba")
    optimizer, restored = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    train(model, optimizer)
    ours.save({"net": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True, rename={"net": "model"})
    assert_same_state(state_of(model, optimizer), state_of(other, restored))


@pytest.mark.parametrize("stepped", [0, 1])
def test_names_that_change_places_take_their_state_along(stepped: int, ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("abc"), Layers("abc")
    groups = [("a", 0.1), ("b", 0.2), ("c", 0.4)]
    optimizer, restored = (torch.optim.AdamW(groups_of(each, groups)) for each in (model, other))
    train(model, optimizer)
    train(other, restored, stepped)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    # The checkpoint has the same names in the same order, and they mean others.
    rename = {"model.a": "model.b", "model.b": "model.a"}
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True, rename=rename)
    assert [group["lr"] for group in restored.param_groups] == [0.2, 0.1, 0.4]
    assert all(map(torch.equal, other.of("bac"), model.of("abc")))
    saved = state_of(model, optimizer)
    expected = {"a.weight": saved["b.weight"], "b.weight": saved["a.weight"], "c.weight": saved["c.weight"]}
    assert_same_state(state_of(other, restored), expected)


def test_state_that_two_optimizers_have_of_a_parameter_goes_to_no_third(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Layers("ab"), Layers("ab")
    first = torch.optim.SGD(model.of("a"), lr=0.1, momentum=0.9)
    second = torch.optim.SGD(model.of("ab"), lr=0.1, momentum=0.5)
    train(model, first)
    train(model, second)
    ours.save({"model": model, "first": first, "second": second}, tmp_path / "one")
    third = torch.optim.SGD(other.of("ab"), lr=0.1, momentum=0.5)
    ours.load(tmp_path / "one", {"model": other, "third": third})
    assert not state_of(other, third)["a.weight"]
    assert_same_state({"b": third.state[other.of("b")[0]]}, {"b": second.state[model.of("b")[0]]})
    assert "'third': the checkpoint has no state of model.a.weight, which begins without" in caplog.text
    again = torch.optim.SGD(other.of("ba"), lr=0.1, momentum=0.5)
    ours.load(tmp_path / "one", {"model": other, "second": again}, strict=True, allow_unexpected=True)
    assert_same_state(state_of(other, again), state_of(model, second))


class NestedState(torch.optim.Optimizer):
    """Keeps what it knows of a parameter in dicts of dicts, in float32 whatever the parameter has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zeros = torch.zeros_like(parameter, dtype=torch.float32)
                state.update(moments={"first": {"average": zeros.clone(), "steps": 0}, "second": zeros.clone()})
                state.update(mode="warm", kinds=["first", "second"])  # torch makes the text of a generator of a text
            first, second = state["moments"]["first"], state["moments"]["second"]
            first["average"].lerp_(parameter.grad.float(), 0.3)
            first["steps"] += 1
            second.addcmul_(first["average"], first["average"], value=0.7)
            parameter.sub_(first["average"] / (second.sqrt() + 1), alpha=0.01)


@pytest.mark.parametrize("stepped", [0, 1])
def test_nested_state_comes_back_in_its_own_dtype(stepped: int, ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("ab", torch.bfloat16), Layers("ba", torch.bfloat16)
    optimizer, restored = NestedState(model.of("ab")), NestedState(other.of("ba"))
    train(model, optimizer)
    train(other, restored, stepped)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    for name in "ab":
        one, two = (
            each.state[layers.of(name)[0]]["moments"] for each, layers in ((optimizer, model), (restored, other))
        )
        assert two["first"]["steps"] == one["first"]["steps"]
        assert restored.state[other.of(name)[0]]["mode"] == "warm"
        assert restored.state[other.of(name)[0]]["kinds"] == ["first", "second"]
        for got, wanted in ((two["first"]["average"], one["first"]["average"]), (two["second"], one["second"])):
            assert got.dtype == torch.float32 and torch.equal(got, wanted)
    train(model, optimizer, 3)
    train(other, restored, 3)
    assert all(map(torch.equal, model.of("ab"), other.of("ab")))


def test_a_parameter_without_a_name_keeps_its_place_and_no_other(ours: Checkpointer, tmp_path: Path) -> None:
    """Of several without a name, only their places say which is which."""

    def run(names: str, value: float) -> tuple[Layers, list[nn.Parameter], torch.optim.Optimizer]:
        model = Layers("abc")
        loose = [nn.Parameter(torch.full((4, 4), value)), nn.Parameter(torch.full((4, 4), -value))]
        first, second, third = model.of(names)
        optimizer = torch.optim.AdamW([first, loose[0], second, loose[1], third])
        for number, parameter in enumerate(loose):
            parameter.grad = torch.full((4, 4), value + number)
        return model, loose, optimizer

    model, loose, optimizer = run("abc", 1.0)
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    other, its, restored = run("cab", 2.0)
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored})
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    for one, two in zip(loose, its, strict=True):
        assert_same_state({"loose": optimizer.state[one]}, {"loose": restored.state[two]})


def test_a_named_parameter_takes_no_state_of_one_without_a_name(ours: Checkpointer, tmp_path: Path) -> None:
    model, other, loose = Layers("a"), Layers("ab"), nn.Parameter(torch.zeros(4, 4))
    optimizer, restored = torch.optim.AdamW([*model.of("a"), loose]), torch.optim.AdamW(other.of("ab"))
    loose.grad = torch.ones(4, 4)
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=False)
    assert_same_state(state_of(model, optimizer), {"a.weight": state_of(other, restored)["a.weight"]})
    assert not state_of(other, restored)["b.weight"]


@pytest.mark.parametrize("stepped", [0, 1])
def test_a_checkpoint_from_before_the_first_step_leaves_no_state_and_says_nothing(
    stepped: int, ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Layers("ab"), Layers("ab")
    optimizer, restored = torch.optim.AdamW(model.of("ab"), lr=0.5), torch.optim.AdamW(other.of("ba"), lr=0.5)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    train(other, restored, stepped)
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    assert not restored.state and "has no state" not in caplog.text


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_parameter_that_was_frozen_begins_without_state(order: str, ours: Checkpointer, tmp_path: Path) -> None:
    model, other = Layers("ab"), Layers("ab")
    model.of("b")[0].requires_grad_(False)
    optimizer, restored = torch.optim.AdamW(model.of("ab")), torch.optim.AdamW(other.of(order))
    train(model, optimizer)
    train(other, restored)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))


def test_an_optimizer_of_another_key_and_state_that_moves_to_another_optimizer(
    ours: Checkpointer, tmp_path: Path
) -> None:
    model, other = Layers("abcd"), Layers("abcd")
    first, second = torch.optim.AdamW(model.of("abc"), lr=0.1), torch.optim.AdamW(model.of("d"), lr=0.2)
    train(model, first)
    train(model, second)
    ours.save({"model": model, "first": first, "second": second}, tmp_path / "one")
    saved = {**first.state, **second.state}
    expected = {name: saved[parameter] for name, parameter in model.named_parameters()}
    for keys, groups in (
        (("first", "second"), (["abc"], ["d"])),  # as it was
        (("first", "second"), (["ab"], ["d", "c"])),  # one has what the other one had
        (("first", "second"), (["d"], ["abc"])),
        (("second", "third"), (["bca"], ["d"])),
        (("all",), (["d", "cab"],)),
    ):
        optimizers = [torch.optim.AdamW([{"params": other.of(each)} for each in members]) for members in groups]
        state = {"model": other, **dict(zip(keys, optimizers, strict=True))}
        ours.load(tmp_path / "one", state, strict=True)
        got = {parameter: value for optimizer in optimizers for parameter, value in optimizer.state.items()}
        assert_same_state({name: got[parameter] for name, parameter in other.named_parameters()}, expected)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert rates == [0.2 if members == "d" else 0.1 for each in groups for members in each]


def test_a_count_of_steps_that_was_a_number_becomes_what_the_optimizer_makes_of_it(
    ours: Checkpointer, tmp_path: Path
) -> None:
    """Older optimizers counted in numbers, and those of today need a tensor."""
    model, other = Layers("ab"), Layers("ba")
    optimizer, restored = torch.optim.AdamW(model.of("ab")), torch.optim.AdamW(other.of("ba"))
    train(model, optimizer)
    state = optimizer.state_dict()
    state["state"] = {number: {**values, "step": int(values["step"])} for number, values in state["state"].items()}
    names = [["model.a.weight", "model.b.weight"]]
    ours.save({"model": model.state_dict(), "optimizer": {**state, "param_names": names}}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored})
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    train(model, optimizer)
    train(other, restored)
    assert all(map(torch.equal, model.of("ab"), other.of("ab")))


def test_what_an_optimizer_drops_when_it_loads_stays_away(ours: Checkpointer, tmp_path: Path) -> None:
    class Caching(NestedState):
        """Has something that is of no use after a load."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                del state["kinds"]

    model, other = Layers("ab"), Layers("ab")
    optimizer, restored = Caching(model.of("ab")), Caching(other.of("ab"))
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored})
    assert all(state.keys() == {"moments", "mode"} for state in restored.state.values())
    assert ours.last_load is not None
    assert {*ours.last_load.differing} == {f"optimizer.state.{number}.kinds" for number in range(2)}


def test_other_values_of_an_optimizer_stay_where_they_are(ours: Checkpointer, tmp_path: Path) -> None:
    class Counting(torch.optim.AdamW):
        """Has more in its state dict than torch's, some of it as deep as the state of parameters."""

        seen: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "seen"})

    model, other = Layers("ab"), Layers("ab")
    optimizer, restored = Counting(model.of("ab")), Counting(other.of("ba"))
    optimizer.seen = {"tokens": {"deep": {"number": 3, "tensor": torch.arange(3)}}, "files": 4}
    restored.seen = {"tokens": {"deep": {"number": 0, "tensor": torch.zeros(3, dtype=torch.int64)}}, "files": 0}
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored}, strict=True)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    assert restored.seen["files"] == 4 and restored.seen["tokens"]["deep"]["number"] == 3
    assert torch.equal(restored.seen["tokens"]["deep"]["tensor"], torch.arange(3))


@pytest.mark.parametrize("there", [True, False], ids=["saved with names", "saved without"])
@pytest.mark.parametrize("here", [True, False], ids=["loaded with names", "loaded without"])
def test_names_that_an_optimizer_was_given_are_no_values_of_its_groups(
    there: bool, here: bool, ours: Checkpointer, tmp_path: Path
) -> None:
    def run(names: str, named: bool) -> tuple[Layers, torch.optim.Optimizer]:
        model = Layers(names)
        params: Any = list(model.named_parameters()) if named else list(model.parameters())
        return model, torch.optim.AdamW(params)

    (model, optimizer), (other, restored) = run("ab", there), run("ba", here)
    if there and "param_names" not in optimizer.param_groups[0]:
        pytest.skip("torch has named parameters from 2.6 on")
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    for target in ({"model": other, "optimizer": restored}, {"model": model, "optimizer": optimizer}):
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
    assert_same_state(state_of(model, optimizer), state_of(other, restored))
    assert restored.param_groups[0].get("param_names") == (["b.weight", "a.weight"] if here else None)
    if there and here:  # a target without the model knows only what its optimizer was given
        alone, its = run("ba", here)
        ours.load(tmp_path / "one", {"optimizer": its}, allow_unexpected=True)
        assert_same_state(state_of(model, optimizer), state_of(alone, its))


def test_names_in_another_form_are_a_damaged_checkpoint(ours: Checkpointer, tmp_path: Path) -> None:
    model = Layers("ab")
    optimizer = torch.optim.AdamW(model.of("ab"))
    train(model, optimizer)
    for number, names in enumerate((["model.a.weight", "model.b.weight"], "model.a.weight", [["model.a.weight", 3]])):
        state = {**optimizer.state_dict(), "param_names": names}
        ours.save({"model": model.state_dict(), "optimizer": state}, tmp_path / str(number))
        restored = torch.optim.AdamW(model.of("ba"))
        with pytest.raises(
            CheckpointCorruptError, match=r"'optimizer\.param_names' is .* a list of names for each group"
        ):
            ours.load(tmp_path / str(number), {"model": model, "optimizer": restored})


def test_each_scheduler_follows_the_groups_of_its_own_optimizer(ours: Checkpointer, tmp_path: Path) -> None:
    def run(first: Sequence[tuple[str, float]], second: Sequence[tuple[str, float]]) -> tuple[Layers, dict[str, Any]]:
        model = Layers("abcd")
        state: dict[str, Any] = {}
        for key, groups in (("first", first), ("second", second)):
            optimizer = torch.optim.SGD(groups_of(model, groups), momentum=0.9)
            state[key] = optimizer
            state[f"{key} scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return model, state

    def step(model: Layers, state: dict[str, Any]) -> None:
        for key in ("first", "second"):
            train(model, state[key], 1)
            state[f"{key} scheduler"].step()

    model, state = run([("a", 0.1), ("b", 0.4)], [("c", 1.6), ("d", 6.4)])
    step(model, state)
    ours.save({"model": model, **state}, tmp_path / "one")
    # A group of parameters that the checkpoint does not have comes first, and keeps what the script gave it.
    other, its = run([("b", 7), ("a", 8)], [("c", 9), ("d", 9)])
    ours.load(tmp_path / "one", {"model": other, **its}, strict=True)
    assert its["first scheduler"].base_lrs == [0.4, 0.1] and its["first scheduler"].get_last_lr() == [0.2, 0.05]
    assert its["second scheduler"].base_lrs == [1.6, 6.4] and its["second scheduler"].get_last_lr() == [0.8, 3.2]
    step(model, state)
    step(other, its)
    assert its["first scheduler"].get_last_lr() == [0.1, 0.025]
    assert all(map(torch.equal, model.of("abcd"), other.of("abcd")))


def test_a_new_group_keeps_its_rate_beside_those_of_the_checkpoint(ours: Checkpointer, tmp_path: Path) -> None:
    def run(names: str, groups: Sequence[tuple[str, float]]) -> tuple[Layers, Any, Any]:
        model = Layers(names)
        optimizer = torch.optim.SGD(groups_of(model, groups), momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model, optimizer, scheduler = run("ab", [("a", 0.1), ("b", 0.4)])
    train(model, optimizer)
    scheduler.step()
    ours.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "one")
    other, restored, its = run("abn", [("n", 3.0), ("b", 7), ("a", 8)])
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored, "scheduler": its}, strict=False)
    assert its.base_lrs == [3.0, 0.4, 0.1] and its.get_last_lr() == [3.0, 0.2, 0.05]
    assert [group["lr"] for group in restored.param_groups] == [3.0, 0.2, 0.05]


def test_what_the_checkpoint_replaces_is_said(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Layers("a"), Layers("a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    restored = torch.optim.AdamW(other.parameters(), lr=0.25, weight_decay=0.5, fused=True)
    train(model, optimizer)
    ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored})
    (line,) = [record.getMessage() for record in caplog.records if "replaces" in record.getMessage()]
    assert "the checkpoint replaces fused True by None, lr 0.25 by 0.1;" in line
    assert "ignore=['optimizer.param_groups.*.fused', 'optimizer.param_groups.*.lr']" in line
    kept = torch.optim.AdamW(other.parameters(), lr=0.25)
    ours.load(tmp_path / "one", {"model": other, "optimizer": kept}, ignore=["optimizer.param_groups.*.lr"])
    assert kept.param_groups[0]["lr"] == 0.25 and kept.param_groups[0]["weight_decay"] == 0.5


def test_a_rate_that_a_scheduler_has_moved_is_no_news(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> tuple[Layers, Any, Any]:
        model = Layers("a")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = run()
    train(model, optimizer)
    scheduler.step()
    ours.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "one")
    other, restored, its = run()
    caplog.set_level(logging.INFO)
    ours.load(tmp_path / "one", {"model": other, "optimizer": restored, "scheduler": its})
    assert restored.param_groups[0]["lr"] == 0.25 and "replaces" not in caplog.text
