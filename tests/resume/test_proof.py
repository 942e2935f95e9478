"""What an object gives back after a load is compared with what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_component import CheckpointLoadError, build_checkpointer


class Own:
    """An object with a tensor, that does something with a state that it takes."""

    def __init__(self, value: float, takes: Callable[[Own, dict[str, Any]], None]) -> None:
        # Bytes are summed eight at a time, and four are left.
        self.weight, self.count = torch.full((1001,), float(value)), int(value)
        self._takes = takes

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.count = state["weight"], state["count"]
        self._takes(self, state)


TAKES: dict[str, tuple[Callable[[Own, dict[str, Any]], Any], tuple[str, ...]]] = {
    "takes it": (lambda own, state: None, ()),
    "copies it onto itself": (lambda own, state: own.weight.copy_(state["weight"]), ()),
    "changes the tensor that was filled": (lambda own, state: own.weight.mul_(2), ("own.weight",)),
    "changes its first value": (lambda own, state: own.weight[:1].add_(1), ("own.weight",)),
    "changes its last value": (lambda own, state: own.weight[-1:].add_(1), ("own.weight",)),
    "casts it": (lambda own, state: setattr(own, "weight", own.weight.half()), ("own.weight",)),
    "casts it in place": (lambda own, state: setattr(own.weight, "data", own.weight.double()), ("own.weight",)),
    "forgets": (lambda own, state: setattr(own, "count", 0), ("own.count",)),
}


@pytest.mark.parametrize("what", TAKES)
def test_an_object_that_gives_back_other_values_is_named(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    takes, differing = TAKES[what]
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save({"own": Own(3, takes)}, tmp_path / "one")
        checkpointer.load(tmp_path / "one", {"own": Own(1, takes)})
        assert checkpointer.last_load is not None
        assert (checkpointer.last_load.differing, checkpointer.last_load.proven) == (
            differing,
            () if differing else ("own",),
        )
    told = [line for line in caplog.messages if "objects give back other values" in line]
    assert len(told) == len(differing) and all(f"{key} (" in told[0] for key in differing)


@pytest.mark.parametrize(("prove", "may_differ"), [("off", "[]"), ("on_read", "[own.c*]")])
def test_a_proof_can_be_left_out_and_keys_can_be_named(
    prove: str, may_differ: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [f"checkpoint.load.prove={prove}", f"checkpoint.load.may_differ={may_differ}"]
    takes, _ = TAKES["forgets"]
    with build_checkpointer("sync", overrides) as checkpointer:
        checkpointer.save({"own": Own(3, takes)}, tmp_path / "one")
        checkpointer.load(tmp_path / "one", {"own": Own(1, takes)})
    assert not any("objects give back other values" in line for line in caplog.messages)


def double(tensors: Iterable[Any]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                tensor.mul_(2)


class Doubling(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict, assign)
        double(self.parameters())
        return result


class DoublingWithin(nn.Linear):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        double(self.parameters())


class GivingOther(nn.Linear):
    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {**super().state_dict(*arguments, **options), "count": torch.randint(1 << 40, (2,))}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"}, strict, assign)


def hooked(way: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if way == "hook after":
        module[1].register_load_state_dict_post_hook(lambda own, keys: double(own.parameters()))
    elif way == "hook before":
        module.register_load_state_dict_pre_hook(lambda own, state, *rest: double(state.values()))
    else:
        module.register_state_dict_post_hook(lambda own, state, *rest: state.update({"0.bias": torch.randn(3)}))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "hook after": lambda: hooked("hook after"),
    "hook before": lambda: hooked("hook before"),
    "hook of what it gives": lambda: hooked("hook of what it gives"),
    "class": lambda: Doubling(3, 3),
    "class of a part": lambda: nn.Sequential(DoublingWithin(3, 3), nn.Linear(3, 3)),
    "class that gives": lambda: GivingOther(3, 3),
}


@pytest.mark.parametrize("way", MODULES)
def test_code_of_others_in_a_module_is_not_trusted(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save({"model": MODULES[way]()}, tmp_path / "one")
        checkpointer.load(tmp_path / "one", {"model": MODULES[way]()})
        assert checkpointer.last_load is not None
        assert checkpointer.last_load.differing and not checkpointer.last_load.proven
    assert "objects give back other values" in caplog.text


class DoublingSGD(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        double(each for state in self.state.values() for each in state.values())


class DoublingInSetState(torch.optim.SGD):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        double(each for state in self.state.values() for each in state.values())


def sgd_with_hook(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.register_load_state_dict_post_hook(
        lambda own: double(each for state in own.state.values() for each in state.values())
    )
    return optimizer


def sgd_with_hook_before(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: double(each for values in state["state"].values() for each in values.values())
    )
    return optimizer


@pytest.mark.parametrize("make", [DoublingSGD, DoublingInSetState, sgd_with_hook, sgd_with_hook_before])
@pytest.mark.parametrize("stepped", [0, 1])
def test_code_of_others_in_an_optimizer_is_not_trusted(
    stepped: int, make: Callable[..., torch.optim.Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(steps: int) -> dict[str, Any]:
        model = nn.Linear(3, 3)
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save(run(2), tmp_path / "one")
        checkpointer.load(tmp_path / "one", run(stepped))
        assert checkpointer.last_load is not None
        keys = {f"optimizer.state.{number}.momentum_buffer" for number in range(2)}
        assert {*checkpointer.last_load.differing} == keys and {*checkpointer.last_load.proven} == {"model"}
    assert "objects give back other values" in caplog.text


def test_an_optimizer_of_torch_that_gives_back_other_values_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if torch had forgotten something."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save({"optimizer": optimizer}, tmp_path / "one")
        given = optimizer.state_dict

        def forgets() -> dict[str, Any]:
            state = given()
            del state["state"][1]["momentum_buffer"]
            state["param_groups"][0]["lr"] = 0.5
            return state

        monkeypatch.setattr(optimizer, "state_dict", forgets)
        text = r"optimizer.state.1.momentum_buffer \(float32 \(3,\) is not given back\).*lr \(0.5 instead of 0.1\).*Do not train on"
        with pytest.raises(CheckpointLoadError, match=text):
            checkpointer.load(tmp_path / "one", {"optimizer": optimizer}, strict=False)
