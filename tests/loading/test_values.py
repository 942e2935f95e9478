"""Every kind of value comes back as it was: from every writer, out of every container, with a target and without."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_component import CheckpointStageError, build_checkpointer, build_manager

TENSORS: dict[str, Any] = {
    "tensor": torch.arange(6.0).view(2, 3),
    "scalar tensor": torch.tensor(2.5),
    "empty tensor": torch.empty(0, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "turned": torch.arange(6).view(2, 3).t(),
    "expanded": torch.arange(3.0).expand(2, 3),
}
PLAIN: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 7,
    "big int": 10**40,
    "float": -2.5,
    "inf": float("inf"),
    "complex": 1 + 2j,
    "text": "\u043a\u043b\u044e\u0447",
    "bytes": b"\0\xff",
    "size": torch.Size([1, 2]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "set": {1, "a"},
    "empty list": [],
    "empty tuple": (),
    "list": [1, [2, "b"]],
    "tuple": (1, (2, None)),
    "python rng": random.Random(3).getstate(),
    "float64": np.float64(0.5),
    "float32": np.float32(1.5),
    "int64": np.int64(-3),
    "numpy bool": np.bool_(True),
    "numpy complex": np.complex64(1j),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "empty array": np.zeros((0, 3)),
    "array of no dimension": np.array(2.0),
    "fortran array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "numpy rng": np.random.RandomState(5).get_state(),
    "numpy generator": np.random.default_rng(5).bit_generator.state,
}


class Holder:
    """An object with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "deep": {"list": [self.value]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert same(state["deep"]["list"][0], state["value"])
        self.value = state["value"]


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda value: value,
    "dict": lambda value: {"a": value, 3: value},
    "ordered": lambda value: OrderedDict(a=value),
    "list": lambda value: [value, 1],
    "tuple": lambda value: (value, "x"),
    "nested": lambda value: {"a": [{"b": [value, (value, [value])]}]},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def wiped(value: Any) -> Any:
    """A target of the same form, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return type(value)((key, wiped(element)) for key, element in value.items())
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(wiped(element) for element in value)
    return Holder(wiped(value.value)) if isinstance(value, Holder) else type(value)() if type(value) is set else None


def plain(state: Any) -> Any:
    """What `load` without a target gives for it."""
    if isinstance(state, Holder):
        return state.state_dict()
    if isinstance(state, dict):
        return type(state)((key, plain(value)) for key, value in state.items())
    return state


def state_of(values: dict[str, Any], *containers: str) -> dict[str, Any]:
    state: dict[str, Any] = {
        container: {name: CONTAINERS[container](value) for name, value in values.items()} for container in containers
    }
    return {**state, "object": {name: Holder(value) for name, value in values.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "values", "containers"),
    [
        ("dcp", TENSORS | PLAIN, list(CONTAINERS)),
        ("torch_save", TENSORS | PLAIN, list(CONTAINERS)),
        ("safetensors", TENSORS, ["bare", "dict", "ordered"]),
    ],
)
def test_a_value_comes_back_as_it_was(
    writer: str, values: dict[str, Any], containers: list[str], tmp_path: Path
) -> None:
    state = state_of(values, *containers)
    overrides = [f"checkpoint/writer={writer}", "checkpoint.durability=process_crash"]
    with build_manager("sync", dir=tmp_path, overrides=overrides) as manager:
        manager.save(1, state)
        path = manager.path_of(1)
    with build_checkpointer("sync", overrides) as ours:
        whole = ours.load(path)
        assert [way for way in differences(plain(state), whole)] == []
        target = wiped(state)
        ours.load(path, target, strict=True)
        assert list(differences(plain(state), plain(target))) == []
        taken: dict[str, Any] = {"object": {name: None for name in values}, **dict.fromkeys(containers)}
        ours.load(path, taken, strict=True)
        assert list(differences(plain(state), taken)) == []
    target = wiped(state)
    with build_manager("sync", dir=tmp_path, overrides=overrides) as manager:
        assert manager.restore(target) == 1
    assert list(differences(plain(state), plain(target))) == []


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, Any]]:
    assert one.keys() == other.keys()
    return [
        (container, name, other[container][name])
        for container, values in one.items()
        for name, value in values.items()
        if not same(value, other[container][name])
    ]


def test_safetensors_refuses_by_key_what_is_no_tensor(tmp_path: Path) -> None:
    with build_checkpointer("sync", ["checkpoint/writer=safetensors"]) as ours:
        for value in PLAIN.values():
            with pytest.raises(CheckpointStageError, match="tensors only, and 'a.b"):
                ours.save({"w": torch.ones(1), "a": {"b": value}}, tmp_path / "one")


@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_a_dict_with_the_key_of_an_encoded_value_is_refused(writer: str, tmp_path: Path) -> None:
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as ours:
        for value in ({"__ckpt_component_numpy__": 1}, [{"__ckpt_component_numpy__": 1}]):
            with pytest.raises(CheckpointStageError, match="'a.b' has the dict key .* which is reserved"):
                ours.save({"a": {"b": value}}, tmp_path / "one")


@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_a_large_array_is_not_decoded_number_by_number(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_few(tensor: torch.Tensor, tolist: Any = torch.Tensor.tolist) -> Any:
        assert tensor.numel() < 1000
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", of_few)
    array = np.arange(1 << 16, dtype=np.float32)
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as ours:
        ours.save({"a": array}, tmp_path / "one")
        loaded = ours.load(tmp_path / "one")["a"]
    assert np.array_equal(loaded, array) and loaded.flags.writeable
