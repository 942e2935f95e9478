"""Dicts of other classes keep their class, and random generators go on where they were."""

from __future__ import annotations

import collections
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_component import Checkpointer, CheckpointError, CheckpointLoadError, PerRank, build_checkpointer


@pytest.fixture(params=["dcp", "torch_save"])
def ours(request: pytest.FixtureRequest) -> Iterator[Checkpointer]:
    overrides = [f"checkpoint/writer={request.param}", "checkpoint.load.prove=on_read"]
    with build_checkpointer("sync", overrides) as checkpointer:
        yield checkpointer


class Settings(dict[str, Any]):
    """A dict of one's own, with an attribute."""

    note = ""


def noted(**values: Any) -> Settings:
    settings = Settings(**values)
    settings.note = "kept"
    return settings


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


MADE_AGAIN: list[Any] = [
    collections.Counter("aab"),
    collections.Counter({3: 4, "x": 1}),
    collections.Counter(),
    collections.defaultdict(int, a=2),
    collections.defaultdict(list, {1: [1, 2], 2: []}),
    collections.defaultdict(dict, a={"b": 1}),
    collections.OrderedDict(b=1, a=2),
]


@pytest.mark.parametrize("value", MADE_AGAIN, ids=repr)
def test_what_can_be_made_again_comes_back_as_it_was(value: Any, ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"a": value, "list": [{"b": value}, torch.ones(2)]}, tmp_path / "one")
    loaded, into = ours.load(tmp_path / "one"), ours.load(tmp_path / "one", {"a": None, "list": [{"b": None}, None]})
    assert all(same(each["a"], value) and same(each["list"][0]["b"], value) for each in (loaded, into))
    if isinstance(value, collections.defaultdict):
        assert loaded["a"].default_factory is value.default_factory


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (collections.Counter("aab"), collections.Counter()),
        (collections.Counter("aab"), collections.Counter("bcd")),
        (collections.Counter(), collections.Counter("bcd")),
        (collections.defaultdict(lambda: 7, a=2), collections.defaultdict(lambda: 8, b=3)),
        (collections.defaultdict(collections.Counter, a=collections.Counter("xy")), collections.defaultdict(None, b=3)),
        (Settings(a=1, b={"c": 2}), noted()),
        (Settings(a=1, b={"c": 2}), noted(a=0, b={"c": 0})),
    ],
    ids=["empty", "counted", "emptied", "factories", "nested", "own, empty", "own"],
)
def test_a_dict_of_the_target_is_filled_and_stays_what_it_is(
    value: Any, target: Any, ours: Checkpointer, tmp_path: Path
) -> None:
    target = copy.deepcopy(target)
    factory = getattr(target, "default_factory", None)
    ours.save({"x": {"a": value}, "w": torch.ones(1)}, tmp_path / "one")
    state: dict[str, Any] = {"x": {"a": target}, "w": torch.zeros(1)}
    ours.load(tmp_path / "one", state, strict=True, allow_unexpected=False)
    assert state["x"]["a"] is target and dict(target) == dict(value)
    assert getattr(target, "default_factory", None) is factory and getattr(target, "note", "kept") == "kept"
    assert {key: type(each) for key, each in target.items()} == {key: type(each) for key, each in value.items()}


def test_tensors_in_such_a_dict_are_filled_in_place(ours: Checkpointer, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    ours.save(
        {"s": Settings(w=torch.ones(3), m=module), "d": collections.defaultdict(list, a=[torch.ones(2)])},
        tmp_path / "1",
    )
    target: dict[str, Any] = {
        "s": Settings(w=torch.zeros(3), m=torch.nn.Linear(2, 2)),
        "d": collections.defaultdict(list, a=[torch.zeros(2)]),
    }
    tensors, other = [target["s"]["w"], target["d"]["a"][0]], target["s"]["m"]
    ours.load(tmp_path / "1", target, strict=True)
    assert tensors[0] is target["s"]["w"] and tensors[1] is target["d"]["a"][0] and all(map(torch.all, tensors))
    assert target["s"]["m"] is other and torch.equal(other.weight, module.weight)


def test_a_class_that_only_a_target_has_is_not_lost_in_silence(
    ours: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours.save({"x": {"a": Settings(b=1), "w": torch.ones(1)}}, tmp_path / "one")
    targets: list[Any] = [None, {"x": {}}, {"x": None}]
    for target in targets:
        caplog.clear()
        assert ours.load(tmp_path / "one", target)["x"]["a"] == {"b": 1}
        (line,) = [record.getMessage() for record in caplog.records if "plain dict came back" in record.getMessage()]
        assert "x.a (" in line and "Settings): only a dict of this class in the target keeps the class" in line
    caplog.clear()
    ours.load(tmp_path / "one", {"x": {"a": Settings(b=0)}})
    ours.load(tmp_path / "one", {"x": {"w": torch.zeros(1)}})
    assert "plain dict" not in caplog.text


class Holder:
    """An object whose state is what it holds."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (collections.Counter("aab"), collections.Counter("bcd")),
        ({"n": collections.Counter("aab")}, {"n": collections.Counter()}),
        ({"n": collections.Counter("aab")}, {}),
        ({"n": Settings(a=1)}, {"n": noted(a=0)}),
        (Settings(a=1, w=torch.ones(2)), noted(a=0, w=torch.zeros(2))),
        ({"n": [collections.defaultdict(lambda: 3, a=1)]}, {"n": [collections.defaultdict(lambda: 4, a=0)]}),
    ],
    ids=["root", "empty", "absent", "own", "own root", "in a list"],
)
def test_an_object_gets_the_classes_that_its_state_has(
    value: Any, target: Any, ours: Checkpointer, tmp_path: Path
) -> None:
    target = copy.deepcopy(target)
    ours.save({"h": Holder(value)}, tmp_path / "one")
    holder = Holder(target)
    ours.load(tmp_path / "one", {"h": holder}, strict=True)
    assert forms(holder.state) == forms(value)
    assert ours.last_load is not None and ours.last_load.proven == ("h",)


def forms(value: Any) -> Any:
    """Classes and values at any depth."""
    if isinstance(value, dict):
        return type(value), {name: forms(inner) for name, inner in value.items()}
    return [forms(inner) for inner in value] if isinstance(value, list) else str(value)


def test_a_dict_in_the_state_of_an_object_keeps_its_attributes_and_factory(ours: Checkpointer, tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        return {"own": noted(a=number), "default": collections.defaultdict(lambda: number, a=number)}

    holder = Holder(state(5))
    ours.save({"h": Holder(state(1))}, tmp_path / "one")
    ours.load(tmp_path / "one", {"h": holder}, strict=True)
    assert holder.state["own"].note == "kept" and holder.state["own"]["a"] == 1
    assert holder.state["default"]["a"] == 1 and holder.state["default"]["b"] == 5


def test_older_releases_read_the_dicts_as_plain_ones(tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(
            {"a": collections.Counter("aab"), "e": collections.Counter(), "w": torch.ones(1)}, tmp_path / "one"
        )
    layout = json.loads((tmp_path / "one" / "integrity-0.json").read_text())["layout"]
    assert {kind for _, kind in layout["containers"]} == {"empty"}
    assert [*layout["classes"]] == [[["a"], "counter"], [["e"], "counter"]]


def torch_draws(generator: torch.Generator) -> list[Any]:
    return torch.rand(5, generator=generator).tolist()


def bits(kind: Any) -> Callable[[int], Any]:
    return lambda seed: np.random.Generator(kind(seed))


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), torch_draws),
    "random": (random.Random, lambda each: [each.gauss(0, 1) for _ in range(5)]),
    "numpy": (np.random.default_rng, lambda each: each.standard_normal(5).tolist()),
    "numpy MT19937": (bits(np.random.MT19937), lambda each: each.integers(1 << 30, size=5).tolist()),
    "numpy Philox": (bits(np.random.Philox), lambda each: each.random(5).tolist()),
    "numpy SFC64": (bits(np.random.SFC64), lambda each: each.random(5).tolist()),
    "numpy RandomState": (np.random.RandomState, lambda each: each.normal(size=5).tolist()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_goes_on_where_it_was(kind: str, ours: Checkpointer, tmp_path: Path) -> None:
    make, draws = GENERATORS[kind]
    saved, others = [make(seed) for seed in (1, 2, 3)], [make(seed) for seed in (7, 8, 9)]
    for each in saved:
        draws(each)

    def state(generators: list[Any]) -> dict[str, Any]:
        return {"a": generators[0], "list": [generators[1], 3], "rank": PerRank({"b": generators[2]})}

    ours.save(state(saved), tmp_path / "one")
    target = state(others)
    ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
    assert target["a"] is others[0] and target["list"][0] is others[1] and target["rank"].value["b"] is others[2]
    assert [draws(each) for each in others] == [draws(each) for each in saved]
    assert ours.last_load is not None and {*ours.last_load.proven} >= {"a", "list.0"}


def test_without_a_target_the_states_of_generators_come_back_plain(ours: Checkpointer, tmp_path: Path) -> None:
    generator, own, numpy = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)
    ours.save({"torch": generator, "random": own, "numpy": numpy}, tmp_path / "one")
    loaded = ours.load(tmp_path / "one")
    assert torch.equal(loaded["torch"]["state"], generator.get_state())
    assert loaded["random"]["state"] == own.getstate()
    assert loaded["numpy"] == numpy.bit_generator.state


def test_the_state_of_another_generator_is_refused_by_key(ours: Checkpointer, tmp_path: Path) -> None:
    ours.save({"g": random.Random(1)}, tmp_path / "one")
    with pytest.raises(CheckpointLoadError, match=r"'g\.state' is a tensor in the target and a Python object"):
        ours.load(tmp_path / "one", {"g": torch.Generator()})
    ours.save({"g": np.random.Generator(np.random.MT19937(1))}, tmp_path / "two")
    with pytest.raises(CheckpointLoadError, match="'g' .* did not take its state"):
        ours.load(tmp_path / "two", {"g": np.random.default_rng(1)})


def test_a_generator_in_the_state_of_an_object_is_refused_by_key(ours: Checkpointer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'h\.g' holds a torch\._C\.Generator.*save x\.get_state\(\) instead"):
        ours.save({"h": Holder({"g": torch.Generator()})}, tmp_path / "one")
