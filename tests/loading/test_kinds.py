"""A load into a target of another form says so by key, for every kind of checkpoint, and changes nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import ones, zeros

from ckpt_component import (
    CheckpointLoadError,
    MissingKeysError,
    PerRank,
    SyncCheckpointer,
    UnexpectedKeysError,
    build_checkpointer,
    build_manager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Save = Callable[[dict[str, Any]], Path]


class Holder:
    """An object with a state."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def ours() -> Iterator[SyncCheckpointer]:
    with build_checkpointer("sync") as checkpointer:
        assert isinstance(checkpointer, SyncCheckpointer)
        yield checkpointer


@pytest.fixture(params=["dcp", "torch_save", "stock dcp", "stock torch.save"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """Saves a state in one of the ways, and gives the path."""

    def saved(state: dict[str, Any]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        if request.param == "stock dcp":
            dcp.save(state, checkpoint_id=path)
        elif request.param == "stock torch.save":
            torch.save(state, path)
        else:
            with build_checkpointer("sync", [f"checkpoint/writer={request.param}"]) as checkpointer:
                checkpointer.save(state, path)
        return path

    return saved


UNLIKE: list[tuple[Any, Any, str | None, str]] = [
    # saved, target, and what the two are called
    ({"a": 1}, [1, 2], "list", "dict"),
    ({"a": 1}, (1, 2), "tuple", "dict"),
    ({"a": 1}, {1, 2}, "set", "dict"),
    ({"a": 1}, zeros(1), "tensor", "dict"),
    ({"a": ones(1)}, [zeros(1)], "list", "dict"),
    ({"0": ones(1)}, [zeros(1)], "list", "dict"),
    ([1, 2], {"a": 1}, "dict", "list"),
    ([1, 2], (1, 2), "tuple", "list"),
    ([1, 2], {}, "dict", "list"),
    ([1, 2], [zeros(1), 2], None, "int"),
    ([1, 2], Holder(a=1), "Holder", "list"),
    ([1, 2], Holder(), "Holder", "list"),
    ([ones(1)], {0: zeros(1)}, "dict", "list"),
    ([ones(1)], (zeros(1),), "tuple", "list"),
    ([ones(1)], zeros(1), "tensor", "list"),
    ([ones(1)], {}, "dict", "list"),
    ([ones(1)], Holder(a=1), "Holder", "list"),
    ((1, 2), [1, 2], "list", "tuple"),
    ((1, 2), [zeros(1), {"a": 1}], "list", "tuple"),
    ("text", [1, 2], "list", "str"),
    ("text", [zeros(1), "u"], "list", "str"),
    (5, {"a": 1}, "dict", "int"),
    (5, Holder(a=1), "Holder", "int"),
    (ones(1), [1], "list", "tensor"),
    (ones(1), {"a": 1}, "dict", "tensor"),
    (ones(1), {"a": zeros(1)}, "dict", "tensor"),
    (ones(1), {}, "dict", "tensor"),
    (ones(1), Holder(a=zeros(1)), "Holder", "tensor"),
    ([5], [Holder(a=zeros(1))], None, "int"),
]


def test_another_kind_of_container_is_an_error_by_key(save: Save, ours: SyncCheckpointer) -> None:
    state = {str(number): {"item": saved} for number, (saved, *_) in enumerate(UNLIKE)}
    path = save({**state, "first": ones(2)})
    for number, (_, value, here, there) in enumerate(UNLIKE):
        first = zeros(2)
        with pytest.raises(CheckpointLoadError) as caught:
            ours.load(path, {"first": first, str(number): {"item": value}})
        place = f"'{number}.item'" if here is not None else f"'{number}.item.0'"
        called = f"is of type {here} in the target and of type {there} in the checkpoint" if here else there
        text = str(caught.value)
        assert f"does not fit the target: {place} " in text and called in text, text
        assert not first.any()  # refused before anything was changed


@pytest.mark.parametrize(
    ("saved", "value", "after"),
    [
        ({"a": 1, "b": ones(1)}, None, {"a": 1, "b": ones(1)}),
        ({"a": 1, "b": ones(1)}, {}, {"a": 1, "b": ones(1)}),
        ([1, ones(1)], None, [1, ones(1)]),
        ([1, ones(1)], [], [1, ones(1)]),
        ([1, ones(1)], [0], [1, ones(1)]),
        ((1, 2), (0, 0, 0), (1, 2)),
        ([1, 2], [0], [1, 2]),
        (ones(1), 5, ones(1)),
        (None, [1, 2], None),
        (None, 5, None),
    ],
)
def test_a_plain_value_takes_what_is_there(
    save: Save, ours: SyncCheckpointer, saved: Any, value: Any, after: Any
) -> None:
    assert ours.load(save({"item": saved}), {"item": value}, strict=True) == {"item": after}


@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_an_empty_dict_is_there(writer: str, tmp_path: Path) -> None:
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as ours:
        ours.save({"item": {}, "object": Holder(x={})}, tmp_path / "one")
        target: dict[str, Any] = {"item": 5, "object": Holder(x=None)}
        ours.load(tmp_path / "one", target, strict=True)
        assert target["item"] == {} and target["object"].state == {"x": {}}
        with pytest.raises(CheckpointLoadError, match="'item' is of type list in the target and of type dict"):
            ours.load(tmp_path / "one", {"item": [1]})
        ours.save({}, tmp_path / "two")
        assert ours.load(tmp_path / "two", {}) == {}


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_tuples_of_another_length_are_warned_of(
    kind: type[Any], save: Save, ours: SyncCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    path = save({"item": kind([ones(1), ones(1)])})
    longer, shorter = {"item": kind(zeros(1) for _ in range(4))}, {"item": kind([zeros(1)])}
    caplog.clear()
    ours.load(path, longer)
    ours.load(path, shorter)
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in told if "manifest" not in text] == [
        f"Checkpoint at {path} is missing keys: ['item.2', 'item.3']; these values are left as they are",
        f"{path} has keys that the target does not have: item.1; they are not loaded",
    ]
    assert [float(value) for value in longer["item"]] == [1, 1, 0, 0] and shorter["item"] == kind([ones(1)])
    longer["item"] = kind([zeros(1) for _ in range(4)])
    with pytest.raises(MissingKeysError) as missing:
        ours.load(path, longer, strict=True)
    assert missing.value.keys == ["item.2", "item.3"]
    shorter["item"] = kind([zeros(1)])
    with pytest.raises(UnexpectedKeysError) as unexpected:
        ours.load(path, shorter, allow_unexpected=False)
    assert unexpected.value.keys == ["item.1"]
    assert not any(value.any() for target in (longer, shorter) for value in target["item"])


#: The same value in the checkpoint and in the target, once in a list and once in a tuple.
INSIDE: list[tuple[list[Any], list[Any]]] = [
    ([ones(3), ones(2)], [zeros(2), zeros(2)]),
    ([ones(3)], [zeros(3, dtype=torch.int64)]),
    ([ones(1), 1], [zeros(1), zeros(1)]),
    ([ones(1), ones(1)], [zeros(1), {"a": zeros(1)}]),
    ([ones(1), None], [zeros(1), zeros(1)]),
    ([ones(1), [1, 2]], [zeros(1), (1, 2)]),
    ([{"a": ones(2), "b": 1}], [{"a": zeros(3), "c": 2}]),
    ([{"a": ones(2), "b": 1}], [{"a": zeros(2), "c": 2}]),
    ([{"a": ones(2)}, ones(1)], [{"a": zeros(2), "c": 2}, zeros(1), 5]),
    ([{"a": ones(2), "b": ones(1)}], [{"a": zeros(2)}]),
    ([[ones(2)], ones(1)], [[zeros(3)], zeros(1)]),
    ([[ones(2)], ones(1)], [[zeros(2), zeros(1)], zeros(1)]),
    ([[ones(2), ones(1)], ones(1)], [[zeros(2)], zeros(1)]),
]


@pytest.mark.parametrize("case", range(len(INSIDE)))
def test_what_is_in_a_tuple_is_compared_as_in_a_list(case: int, save: Save, ours: SyncCheckpointer) -> None:
    """The same errors for the same keys and, where the difference is allowed, the same values."""
    outcomes, (saved, value) = [], INSIDE[case]
    for kind in (list, tuple):
        path = save({"first": ones(1), "item": kind(saved)})
        first, outcome = zeros(1), list[Any]()
        try:
            ours.load(path, {"first": first, "item": kind(value)}, strict=True, allow_unexpected=False)
        except CheckpointLoadError as error:
            keys = sorted(set(re.findall(r"item(?:\.\w+)+", str(error))))
            outcome += [type(error), keys, getattr(error, "keys", None)]
        assert outcome and not first.any()
        target = {"first": zeros(1), "item": kind(clone(value))}
        try:
            ours.load(path, target, allow_dtype_cast=True)
            outcome += [[*target["item"]]]
            assert type(target["item"]) is kind
        except CheckpointLoadError as error:
            outcome += [type(error)]
        outcomes.append(outcome)
    assert str(outcomes[0]) == str(outcomes[1])


def clone(value: Any) -> Any:
    """A copy of a nested value, with tensors of its own."""
    if isinstance(value, dict):
        return {name: clone(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(clone, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_an_object_compares_the_tuples_of_its_state(save: Save, ours: SyncCheckpointer) -> None:
    path = save({"object": {"x": (ones(3), 1)}})
    target = Holder(x=(zeros(2), zeros(1), 5))
    ours.load(path, {"object": target}, strict=True, allow_unexpected=False)
    assert str(target.state) == str({"x": (ones(3), 1)})


def test_what_is_missing_is_named_in_part_and_held_in_full(
    ours: SyncCheckpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"k{number:04}" for number in range(3000)]
    ours.save({"a": ones(1), **dict.fromkeys(keys, 1)}, tmp_path / "many")
    ours.save({"a": ones(1)}, tmp_path / "one")
    target = {"a": zeros(1), **dict.fromkeys(keys, 0)}
    with pytest.raises(
        MissingKeysError, match=r"is missing keys: \['k0000', .* 'k0019'\] and 2980 more; strict=False"
    ) as caught:
        ours.load(tmp_path / "one", target, strict=True)
    assert caught.value.keys == keys and len(str(caught.value)) < 400 + len(str(tmp_path))
    with pytest.raises(UnexpectedKeysError, match="k0019 and 2980 more; pass allow_unexpected=True") as unexpected:
        ours.load(tmp_path / "many", {"a": zeros(1)}, allow_unexpected=False)
    assert unexpected.value.keys == keys
    caplog.clear()
    assert ours.load(tmp_path / "one", target, strict=False)["a"] == 1
    (told,) = caplog.messages
    assert "is missing keys: ['k0000', 'k0001'" in told and told.count("k0") == 20


def test_an_object_is_given_what_there_is_whatever_its_state_is_now(save: Save, ours: SyncCheckpointer) -> None:
    states: list[tuple[Any, Any]] = [
        ({"x": {"a": 1}}, {"x": [1, 2]}),
        ({"x": [ones(1)]}, {"x": None}),
        ({"x": (1, 2)}, {"x": {"a": 1}}),
        ({"x": 1}, {"x": [zeros(1)]}),
        ({"x": [ones(1)]}, {"x": [zeros(1), zeros(1)]}),
        ({"x": [ones(1)]}, {"x": {"a": zeros(1)}}),
        ({"x": {"a": ones(1)}}, {"x": [zeros(1)]}),
        ({"x": {"a": ones(1)}}, {"x": zeros(1)}),
    ]
    path = save({str(number): saved for number, (saved, _) in enumerate(states)})
    for number, (saved, now) in enumerate(states):
        target = Holder(**now)
        ours.load(path, {str(number): target})
        assert target.state == saved


def test_a_value_of_each_rank_is_looked_into(save: Save, ours: SyncCheckpointer) -> None:
    path = save({"own": {"rank_00000": [1, 2], "rank_00001": {"a": 1}}})
    for value in ({"a": 1}, (1, 2)):
        with pytest.raises(CheckpointLoadError, match=r"'own.rank_00000' is of type (dict|tuple) .* and of type list"):
            ours.load(path, {"own": PerRank(value, "first")})
    target = {"own": PerRank([0], "first")}
    ours.load(path, target)
    assert target["own"].value == [1, 2]


def test_flat_keys_of_a_safetensors_file(ours: SyncCheckpointer, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "flat.safetensors"
    save_file({"model.0.weight": ones(1), "model.0.bias": ones(2), "list.0": ones(1), "a": ones(1)}, path)
    target: dict[str, Any] = {"model": [{"weight": zeros(1), "bias": zeros(2)}], "list": {"0": zeros(1)}}
    ours.load(path, target, strict=True)
    assert target["model"][0]["bias"].all() and target["list"]["0"].all()
    with pytest.raises(CheckpointLoadError, match="'a' is of type dict in the target and of type tensor"):
        ours.load(path, {"a": {"b": zeros(1)}})
    # Such a file has no dict of this name, so nothing is made up of its keys.
    with pytest.raises(MissingKeysError) as caught:
        ours.load(path, {"model": None}, strict=True)
    assert caught.value.keys == ["model"]
    held = Holder(weight=zeros(1))
    wrong: dict[str, Any] = {"model": held}
    ours.load(path, wrong)
    assert list(wrong) == ["model"] and held.state == {"weight": zeros(1)}


UNFILLABLE: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: torch.empty(2, 3, device="meta"), "meta device"),
    (lambda: zeros(3).expand(2, 3), "expanded"),
    (lambda: zeros(2, 3).to_sparse(), "sparse"),
    (lambda: torch.nn.LazyLinear(2).weight, "not initialized"),
    (lambda: torch.nested.nested_tensor([zeros(3), zeros(2)], layout=torch.jagged), "nested"),
]


@pytest.mark.filterwarnings("ignore")
def test_a_target_that_cannot_be_filled_is_an_error_by_key(save: Save, ours: SyncCheckpointer) -> None:
    path = save({"first": ones(2), "a": ones(2, 3)})
    for made, text in UNFILLABLE:
        first = zeros(2)
        with pytest.raises(CheckpointLoadError, match=f"'a' in the target is .*{text}"):
            ours.load(path, {"first": first, "a": made()})
        assert not first.any()


def test_a_target_that_was_made_in_inference_mode_is_filled(save: Save, ours: SyncCheckpointer) -> None:
    path = save({"a": ones(2, 3)})
    with torch.inference_mode():
        target = {"a": zeros(3, 2).t()}
    ours.load(path, target)
    assert target["a"].eq(1).all()


def test_restore_converts_where_its_error_says_how(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"a": ones(2)})
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with build_manager("sync", dir=tmp_path) as manager:
        with pytest.raises(CheckpointLoadError, match="pass allow_dtype_cast=True to convert it"):
            manager.restore(target)
        assert manager.restore(target, allow_dtype_cast=True) == 1
    assert target["a"].eq(1).all()
