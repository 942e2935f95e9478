"""A module is saved under its canonical names, and loads into any wrapping; so do checkpoints with other names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt_component import Checkpointer, MissingKeysError, build_checkpointer, build_manager, load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WRAPPINGS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": lambda model: compiled(model),
    "DDP": DistributedDataParallel,
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "a compiled layer": lambda model: nn.Sequential(compiled(model[0]), model[1], model[2]),
    "activation checkpointing": lambda model: nn.Sequential(checkpoint_wrapper(model[0]), model[1], model[2]),
    "compiled activation checkpointing": lambda model: compiled(checkpoint_wrapper(model)),
    "activation checkpointing of compiled": lambda model: nn.Sequential(
        checkpoint_wrapper(compiled(model[0])), *model[1:]
    ),
    "DataParallel": DataParallel,
}


def compiled(module: nn.Module) -> nn.Module:
    made: Any = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


class Counter(nn.Module):
    """A buffer and an extra state with a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.seen: dict[str, Any] = {"last": [torch.zeros(2)], "name": "none"}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def plain(value: float = 0.0) -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Counter())
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(value * (number + 1))
    model[2].seen = {"last": [torch.full((2,), value)], "name": f"{value}"}
    return model


def trained(value: float, wrap: Callable[[Any], nn.Module]) -> tuple[Any, dict[str, Any]]:
    """A model, and a state with it in a wrapping and its optimizer."""
    model = plain(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, value + number)
    optimizer.step()
    return model, {"model": wrap(model), "optimizer": optimizer}


def values_of(model: Any) -> list[Any]:
    seen = model[2].seen
    tensors = [*model.parameters(), *model.buffers(), *seen["last"]]
    return [*(tensor.tolist() for tensor in tensors), seen["name"], type(seen["last"])]


def moments(state: dict[str, Any]) -> list[Any]:
    of_parameters = state["optimizer"].state_dict()["state"]
    return [(number, {key: value.tolist() for key, value in of_parameters[number].items()}) for number in of_parameters]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ours() -> Iterator[Checkpointer]:
    overrides = ["checkpoint.durability=process_crash", "checkpoint.load.prove=on_read"]
    with build_checkpointer("sync", overrides) as checkpointer:
        yield checkpointer


def keys_at(path: Path) -> set[str]:
    return {key for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata if key.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize("saved", WRAPPINGS)
def test_a_model_and_its_optimizer_load_into_any_wrapping(saved: str, ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, WRAPPINGS[saved])
    ours.save(state, tmp_path / "one")
    assert keys_at(tmp_path / "one") == {
        *(f"model.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")),
        *(f"model.2.{name}" for name in ("count", "_extra_state.last.0", "_extra_state.name")),
    }
    for name, wrap in WRAPPINGS.items():
        other, target = trained(2.0, wrap)
        places = [parameter.data_ptr() for parameter in other.parameters()]
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
        assert values_of(model) == values_of(other), name
        assert moments(state) == moments(target), name
        assert places == [parameter.data_ptr() for parameter in other.parameters()]
        assert ours.last_load is not None and sorted(ours.last_load.proven) == ["model", "optimizer"], name


@pytest.mark.parametrize("saved", ["compiled", "DDP of compiled", "a compiled layer"])
def test_names_are_those_of_torch_and_stock_dcp_loads_them(saved: str, ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, WRAPPINGS[saved])
    ours.save(state, tmp_path / "one")
    target: dict[str, Any] = {"model": get_model_state_dict(WRAPPINGS[saved](plain()))}
    assert {f"model.{key}" for key in target["model"] if "extra" not in key} == {
        key for key in keys_at(tmp_path / "one") if "extra" not in key
    }
    dcp.load(target, checkpoint_id=tmp_path / "one")
    assert torch.equal(target["model"]["1.weight"], model[1].weight)


def save_as(kind: str, state: dict[str, Any], path: Path, ours: Checkpointer) -> None:
    """Save a state with the names that its modules have themselves, as older versions and other programs do."""
    plain_state = {key: value.state_dict() for key, value in state.items()}
    if kind == "torch.save":
        torch.save(plain_state, path)
    elif kind == "stock DCP":
        dcp.save(plain_state, checkpoint_id=path)
    else:
        ours.save({"model": plain_state["model"], "optimizer": state["optimizer"]}, path)


@pytest.mark.parametrize("kind", ["a plain dict", "torch.save", "stock DCP"])
@pytest.mark.parametrize("saved", ["plain", "DDP of compiled", "a compiled layer"])
def test_names_with_the_parts_of_wrappers_load_into_any_wrapping(
    saved: str, kind: str, ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, state = trained(1.0, WRAPPINGS[saved])
    save_as(kind, state, tmp_path / "one", ours)
    for name in ("plain", "compiled", "DDP", "activation checkpointing of compiled"):
        other, target = trained(2.0, WRAPPINGS[name])
        caplog.clear()
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
        assert values_of(model) == values_of(other), name
        assert moments(state) == moments(target), name
        renamed = [line for line in caplog.messages if "under the name of another wrapping" in line]
        assert len(renamed) == (saved != "plain"), caplog.messages


@pytest.mark.parametrize("saved", ["plain", "DDP of compiled"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_plain_dicts_of_any_wrapping_are_filled(saved: str, as_dict: bool, ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, WRAPPINGS[saved])
    if as_dict:
        state["model"] = state["model"].state_dict()
    ours.save(state, tmp_path / "one")
    for name in ("plain", "compiled", "DDP of compiled"):
        other, target = trained(2.0, WRAPPINGS[name])
        target["model"] = target["model"].state_dict()
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
        assert torch.equal(model[1].weight, other[1].weight) and torch.equal(model[2].count, other[2].count), name
        assert moments(state) == moments(target), name


def test_own_names_that_an_optimizer_was_given_may_have_the_parts_of_wrappers(
    ours: Checkpointer, tmp_path: Path
) -> None:
    model, other = plain(), plain()
    named = [*compiled(model).named_parameters()]
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    for number, (_, parameter) in enumerate(named):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, number)}
    ours.save({"optimizer": optimizer}, tmp_path / "one")
    turned = torch.optim.SGD([*other.named_parameters()][::-1], lr=0.1, momentum=0.9)
    ours.load(tmp_path / "one", {"optimizer": turned}, strict=True)
    for number, parameter in enumerate(other.parameters()):
        assert torch.equal(turned.state[parameter]["momentum_buffer"], torch.full_like(parameter, number))


def test_a_child_that_its_author_called_module_keeps_its_name(ours: Checkpointer, tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        return model

    for number, wrap in enumerate((lambda model: model, DistributedDataParallel, compiled)):
        path, model = tmp_path / str(number), make(1.0)
        ours.save({"model": wrap(model)}, path)
        assert keys_at(path) == {f"model.{child}.{name}" for child in ("module", "head") for name in ("weight", "bias")}
        other = make(0.0)
        ours.load(path, {"model": DistributedDataParallel(other)}, strict=True, allow_unexpected=False)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_all_names_of_a_module_stay_where_two_values_would_get_one(ours: Checkpointer, tmp_path: Path) -> None:
    def make(value: float) -> Any:
        model: Any = DistributedDataParallel(plain(value))
        model.register_buffer("extra", torch.full((1,), value))
        model.module.register_buffer("extra", torch.full((1,), value + 1))
        return model

    model, other = make(1.0), make(5.0)
    ours.save({"model": model}, tmp_path / "one")
    assert {"model.extra", "model.module.extra", "model.module.0.weight"} <= keys_at(tmp_path / "one")
    ours.load(tmp_path / "one", {"model": other}, strict=True, allow_unexpected=False)
    assert other.extra == 1.0 and other.module.extra == 2.0


def test_nothing_is_guessed_where_two_values_differ_in_wrappers_alone(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"_orig_mod.a": torch.ones(1), "module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one")
    for target in ({"a": torch.zeros(1)}, {"_orig_mod.b": torch.zeros(1), "module.b": torch.zeros(1)}):
        with pytest.raises(MissingKeysError):
            ours.load(tmp_path / "one", target, strict=True)


def test_a_value_that_another_name_has_is_not_taken_for_it(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"model": {"weight": torch.ones(1)}}, tmp_path / "one")
    target = {"model": {"weight": torch.zeros(1), "module.weight": torch.zeros(1)}}
    with pytest.raises(MissingKeysError, match=r"model\.module\.weight"):
        ours.load(tmp_path / "one", target, strict=True)


def test_a_whole_target_and_load_weights_may_be_wrapped(ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, WRAPPINGS["DDP of compiled"])
    ours.save(state, tmp_path / "one")
    torch.save(state["model"].state_dict(), tmp_path / "two.pt")
    for name, wrap in WRAPPINGS.items():
        for load in (
            lambda target: ours.load(tmp_path / "two.pt", target, strict=True, allow_unexpected=False),
            lambda target: load_weights(target, tmp_path / "two.pt", key=""),
            lambda target: load_weights(target, tmp_path / "one"),
            lambda target: load_weights(target, tmp_path / "one", key="model.module"),
        ):
            other = plain()
            load(wrap(other))
            assert values_of(model) == values_of(other), name


def test_a_module_inside_an_objects_state_gets_its_own_names(ours: Checkpointer, tmp_path: Path) -> None:
    class Holder:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def state_dict(self) -> dict[str, Any]:
            return {"net": self.module}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.module.load_state_dict(state["net"])

    model, other = plain(1.0), plain()
    ours.save({"model": Holder(WRAPPINGS["DDP of compiled"](model))}, tmp_path / "one")
    assert "model.net.0.weight" in keys_at(tmp_path / "one")
    ours.load(tmp_path / "one", {"model": Holder(compiled(other))}, strict=True)
    assert values_of(model) == values_of(other)


def test_code_that_renames_values_of_older_models_gets_them_in_any_wrapping(ours: Checkpointer, tmp_path: Path) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    def make() -> nn.Linear:
        layer = nn.Linear(2, 2, bias=False)
        layer.register_load_state_dict_pre_hook(rename)
        return layer

    torch.save({"model": {"0.old": torch.ones(2, 2)}}, tmp_path / "one.pt")
    for wrap in WRAPPINGS.values():
        model: Any = nn.Sequential(make(), nn.Identity(), nn.Identity())
        ours.load(tmp_path / "one.pt", {"model": wrap(model)})
        assert torch.equal(model[0].weight, torch.ones(2, 2))


def test_messages_and_settings_have_the_canonical_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Shifts(nn.Linear):
        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            super()._load_from_state_dict(*args, **kwargs)
            with torch.no_grad():
                self.bias.add_(1)

    def state() -> dict[str, Any]:
        return {"model": compiled(nn.Sequential(Shifts(2, 2)))}

    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, state())
    for overrides, is_said in (([], True), (["checkpoint.load.may_differ=[model.0.bias]"], False)):
        caplog.clear()
        with build_manager("sync", overrides, dir=tmp_path) as manager:
            assert manager.restore(state()) == 1
        assert any("model.0.bias (" in line for line in caplog.messages) == is_said


def test_a_rename_that_took_a_wrapper_away_still_works_and_is_retired(ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, DistributedDataParallel)
    ours.save(state, tmp_path / "new")
    save_as("torch.save", state, tmp_path / "old.pt", ours)
    for name in ("old.pt", "new"):
        other = plain()
        if name == "new":
            with pytest.warns(DeprecationWarning, match=r"'model\.module' in rename is deprecated"):
                ours.load(tmp_path / name, {"model": other}, rename={"model.module": "model"}, strict=True)
        else:
            ours.load(tmp_path / name, {"model": other}, rename={"model.module": "model"}, strict=True)
        assert values_of(model) == values_of(other)


@pytest.mark.parametrize("name", ["model.0", "model.module.0"])
def test_what_is_ignored_stays_under_either_name(name: str, ours: Checkpointer, tmp_path: Path) -> None:
    model, state = trained(1.0, DistributedDataParallel)
    save_as("torch.save", state, tmp_path / "one.pt", ours)
    other = plain(9.0)
    ours.load(tmp_path / "one.pt", {"model": compiled(other)}, strict=True, ignore=[name])
    assert torch.equal(other[0].weight, plain(9.0)[0].weight) and torch.equal(other[1].weight, model[1].weight)


def test_nothing_is_said_about_a_model_without_wrappers(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, state = trained(1.0, WRAPPINGS["plain"])
    with caplog.at_level(logging.INFO):
        ours.save(state, tmp_path / "one")
        ours.load(tmp_path / "one", trained(2.0, WRAPPINGS["plain"])[1], strict=True)
    assert not any("wrapping" in line for line in caplog.messages)
