"""What a load could not give back is refused at the save, by key, with what to write instead."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from ckpt_component import CheckpointStageError, PerRank, SyncCheckpointer, build_checkpointer, build_manager


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Color(enum.Enum):
    RED = 1


class Name(str, enum.Enum):
    ONE = "one"


class Number(int):
    pass


Point = collections.namedtuple("Point", "x y")

INSTEAD: list[tuple[Any, str]] = [
    (Settings(), "dataclasses.asdict(x)"),
    (pathlib.Path("/x"), "str(x)"),
    (decimal.Decimal("1.5"), "str(x)"),
    ((torch.Generator(),), "x.get_state()"),
    ((random.Random(1),), "x.getstate()"),
    ((np.random.default_rng(1),), "x.bit_generator.state"),
    ((np.random.RandomState(1),), "x.get_state()"),
    (np.ma.masked_array([1, 2], mask=[False, True]), "numpy.asarray(x)"),
    (Color.RED, "x.value or x.name"),
    (Name.ONE, "x.value or x.name"),
    (Point(1, torch.ones(1)), "x._asdict()"),
    (collections.deque([1]), "list(x)"),
    (frozenset([1]), "set(x)"),
    (datetime.datetime(2020, 1, 1), "x.isoformat()"),
    (datetime.timedelta(1), "x.total_seconds()"),
    (argparse.Namespace(a=1), "vars(x)"),
    (types.SimpleNamespace(a=1), "vars(x)"),
    (OmegaConf.create({"a": 1, "b": "${a}"}), "OmegaConf.to_container(x)"),
    (OmegaConf.create([1]), "OmegaConf.to_container(x)"),
    (Number(3), "int(x)"),
    ((collections.defaultdict(int),), "dict(x)"),
    (np.array(["text"]), ".tolist()"),
]


@pytest.fixture(params=["dcp", "torch_save"])
def ours(request: pytest.FixtureRequest) -> Iterator[SyncCheckpointer]:
    with build_checkpointer("sync", [f"checkpoint/writer={request.param}"]) as checkpointer:
        assert isinstance(checkpointer, SyncCheckpointer)
        yield checkpointer


def refused(ours: SyncCheckpointer, state: Any, path: Path) -> str:
    with pytest.raises(CheckpointStageError) as caught:
        ours.save(state, path)
    assert not path.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    "nest", [lambda value: value, lambda value: [1, value], lambda value: (1, value)], ids=["bare", "list", "tuple"]
)
def test_an_unsupported_value_is_refused_with_what_to_save_instead(
    ours: SyncCheckpointer, nest: Callable[[Any], Any], tmp_path: Path
) -> None:
    for value, instead in INSTEAD:
        text = refused(ours, {"a": {"b": nest(value)}}, tmp_path / "one")
        assert text.startswith("'a.b") and f"{instead}" in text, text


def test_what_is_advised_can_be_saved(ours: SyncCheckpointer, tmp_path: Path) -> None:
    advised = {}
    for number, (x, instead) in enumerate(INSTEAD):
        for part in re.findall(r"[\w.]+\(x\)|x[\w.]+(?:\(\))?", instead.replace(".tolist()", "x.tolist()")):
            names = {"x": x[0] if type(x) is tuple else x, "dataclasses": dataclasses, "numpy": np}
            advised[f"{number} {part}"] = eval(part, {**names, "OmegaConf": OmegaConf})
    assert len(advised) >= len(INSTEAD)
    ours.save(advised, tmp_path / "one")
    assert ours.load(tmp_path / "one").keys() == advised.keys()


class Half:
    """Gives a state and does not take it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


class Whole(Half):
    def load_state_dict(self, state: Any) -> None:
        self.state = state


def endless_list() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def endless_dict() -> dict[str, Any]:
    values: dict[str, Any] = {"x": torch.ones(1)}
    values["me"] = values
    return values


def deep_dict() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(5000):
        values = {"a": values}
    return values


def deep_tuple() -> tuple[Any, ...]:
    values: tuple[Any, ...] = ()
    for _ in range(5000):
        values = (values,)
    return values


@pytest.mark.parametrize("container", [dict, list, tuple])
def test_what_is_saved_is_deep_enough_to_be_loaded(tmp_path: Path, container: type) -> None:
    """At the limit of nesting, from deep within a program."""

    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value} if container is dict else container([value])
        return value

    def deep(frames: int) -> None:
        if frames:
            return deep(frames - 1)
        state = {"d": nested(199)}
        with build_manager("sync", dir=tmp_path) as manager:
            with pytest.raises(CheckpointStageError, match="more than 200 levels deep"):
                manager.save(1, {"d": nested(202)})
            manager.save(2, state)
            assert manager.restore(state) == 2
        assert state == {"d": nested(199)}

    deep(100)


class Own:
    """Its state holds itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"me": self}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "'a.b' holds a builtins.object"),
        (torch.empty(2, device="meta"), "'a.b' is on the meta device"),
        (torch.eye(2).to_sparse(), "'a.b' is sparse"),
        ({"c.d": 1, "c": {"d": 2}}, "the same key 'a.b.c.d'"),
        ({(1, 2): 3}, "use str or int keys"),
        (Half({"x": 1}), "'a.b' is a Half, which has state_dict() but no load_state_dict()"),
        (Whole(None), "'a.b' is a Whole, whose state_dict() returned a NoneType; a dict is expected"),
        (Whole(torch.ones(1)), "'a.b' is a Whole, whose state_dict() returned a Tensor"),
        (Whole({"x": PerRank(1)}), "'a.b.x' is a PerRank in an object's state_dict()"),
        (torch.nn.LazyLinear(3), "'a.b.weight' is not initialized yet"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.int4), "'a.b' is torch.int4"),  # type: ignore[attr-defined]
        ((torch.zeros(2, dtype=torch.uint8).view(torch.uint2),), "'a.b' is torch.uint2"),  # type: ignore[attr-defined]
        (endless_list(), "'a.b.1' contains itself"),
        (endless_dict(), "'a.b.me' contains itself"),
        (Own(), "'a.b.me' contains itself"),
        (deep_dict(), "The state dict is nested more than 200 levels deep"),
        (deep_tuple(), "'a.b' is nested more than 200 levels deep"),
        ({Name.ONE: 1}, "A key of a.b is the Name"),
        ({np.float64(1): 1}, "A key of a.b is the float64"),
    ],
)
def test_a_state_that_no_load_gives_back_is_refused(
    ours: SyncCheckpointer, value: Any, text: str, tmp_path: Path
) -> None:
    assert text in refused(ours, {"a": {"b": value}}, tmp_path / "one")


def test_what_the_object_around_it_restores_needs_no_load_of_its_own(ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save({"a": Whole({"inner": Half({"x": 1}), "none": Half(3)})}, tmp_path / "one")
    target = Whole({})
    ours.load(tmp_path / "one", {"a": target})
    assert target.state == {"inner": {"x": 1}, "none": 3}


def test_a_config_is_no_state(ours: SyncCheckpointer, tmp_path: Path) -> None:
    assert "got a DictConfig" in refused(ours, OmegaConf.create({"a": 1}), tmp_path / "one")


@pytest.mark.parametrize("name", ["quint8", "qint8", "qint32", "quint4x2", "quint2x4"])
def test_integers_viewed_as_quantized_are_refused_by_their_dtype(
    name: str, ours: SyncCheckpointer, tmp_path: Path
) -> None:
    """`is_quantized` denies that they are, and what a load makes of them ends the process."""
    integers = torch.arange(16, dtype=torch.int32 if name == "qint32" else torch.uint8)
    try:
        viewed = integers.view(getattr(torch, name))
    except RuntimeError as error:
        pytest.skip(str(error))
    with pytest.raises(CheckpointStageError, match=f"'a' is torch.{name} without a scale, which cannot be"):
        ours.save({"a": viewed}, tmp_path / "one")
    ours.save({"a": integers}, tmp_path / "two")
