"""Loading: into targets, partly, strictly, from stock checkpoints, and never by running what a file says."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    MissingKeysError,
    SyncCheckpointer,
    build_checkpointer,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["dcp", "torch_save"])
def ours(request: pytest.FixtureRequest) -> Any:
    with build_checkpointer("sync", [f"checkpoint/writer={request.param}"]) as checkpointer:
        yield checkpointer


def trained() -> dict[str, Any]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def fresh() -> dict[str, Any]:
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    for key, value in left["model"].state_dict().items():
        assert torch.equal(value, right["model"].state_dict()[key])
    states = [part["optimizer"].state_dict()["state"] for part in (left, right)]
    assert states[0].keys() == states[1].keys() and len(states[0]) == 4
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


def test_objects_get_their_state_back_also_what_they_do_not_have_yet(ours: SyncCheckpointer, tmp_path: Path) -> None:
    state = trained()
    ours.save({**state, "step": 3}, tmp_path / "one")
    target = {**fresh(), "step": 0}
    weight = target["model"][0].weight
    assert ours.load(tmp_path / "one", target, strict=True) is target
    assert target["step"] == 3
    assert target["model"][0].weight is weight
    assert_same(state, target)


def test_a_part_of_a_checkpoint_and_missing_keys(ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save({"a": torch.ones(2), "b": {"c": 1, "d": torch.zeros(1)}, "e": [1, 2]}, tmp_path / "one")
    target: dict[str, Any] = {"b": None, "x": 5}
    assert ours.load(tmp_path / "one", target)["b"] == {"c": 1, "d": torch.zeros(1)}
    assert target["x"] == 5 and "a" not in target
    with pytest.raises(
        MissingKeysError, match=r"^Checkpoint at .* is missing keys: \['x'\]; strict=False leaves"
    ) as caught:
        ours.load(tmp_path / "one", target, strict=True)
    assert caught.value.keys == ["x"]


def test_shape_and_dtype_must_fit(ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save({"a": torch.ones(2)}, tmp_path / "one")
    with pytest.raises(CheckpointLoadError, match=r"'a' has shape \(3,\) in the target and \(2,\) in the checkpoint"):
        ours.load(tmp_path / "one", {"a": torch.ones(3)})
    with pytest.raises(CheckpointLoadError, match="allow_dtype_cast"):
        ours.load(tmp_path / "one", {"a": torch.zeros(2, dtype=torch.bfloat16)})
    cast = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    ours.load(tmp_path / "one", cast, allow_dtype_cast=True)
    assert cast["a"].eq(1).all()


def test_non_contiguous_targets_and_map_location(ours: SyncCheckpointer, tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    ours.save({"a": value}, tmp_path / "one")
    target = {"a": torch.zeros(4, 3).t()}
    ours.load(tmp_path / "one", target)
    assert torch.equal(target["a"], value)
    for place in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage):
        assert torch.equal(ours.load(tmp_path / "one", default_map_location=place)["a"], value)


def test_stock_checkpoints_load(tmp_path: Path) -> None:
    state = trained()
    plain = {key: part.state_dict() for key, part in state.items()}
    dcp.save({**plain, "n": 4, "list": [1, torch.ones(3)]}, checkpoint_id=tmp_path / "dcp")
    torch.save({**plain, "n": 4}, tmp_path / "file.pt")
    with build_checkpointer("sync") as ours:
        for name in ("dcp", "file.pt"):
            target = {**fresh(), "n": 0}
            ours.load(tmp_path / name, target, strict=True)
            assert target["n"] == 4
            assert_same(state, target)
        loaded = ours.load(tmp_path / "dcp")
        assert loaded["n"] == 4 and torch.equal(loaded["list"][1], torch.ones(3))


def test_ties_come_back_as_one_tensor(ours: SyncCheckpointer, tmp_path: Path) -> None:
    weight = torch.randn(4)
    ours.save({"a": weight, "b": weight, "c": weight.clone()}, tmp_path / "one")
    loaded = ours.load(tmp_path / "one")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["c"].data_ptr()


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_nothing_in_a_file_is_ever_called(tmp_path: Path) -> None:
    marker = tmp_path / "called"
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(marker)))
    torch.save({"a": Malicious(marker)}, tmp_path / "evil.pt")
    with build_checkpointer("sync") as ours:
        with pytest.raises(CheckpointCorruptError, match=r"posix\.mkdir"):
            ours.load(folder)
        with pytest.raises(CheckpointLoadError, match=r"safe loading refuses: .*posix\.mkdir"):
            ours.load(tmp_path / "evil.pt")
        with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint at"):
            ours.load(tmp_path / "nowhere")
        with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
            (tmp_path / "empty").mkdir()
            ours.load(tmp_path / "empty")
    assert not marker.exists()


def test_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    with build_checkpointer("sync") as ours:
        ours.save({"a": torch.ones(100), "n": 1}, tmp_path / "one")
        for name in ("__0_0.distcp", "integrity-0.json", "manifest.json"):
            path = tmp_path / "one" / name
            whole = path.read_bytes()
            path.write_bytes(whole[:-2])
            with pytest.raises(CheckpointCorruptError, match=name):
                ours.load(tmp_path / "one")
            path.write_bytes(whole)
        (tmp_path / "one" / "__0_1.distcp").unlink()
        with pytest.raises(CheckpointCorruptError, match=r"__0_1\.distcp is missing"):
            ours.load(tmp_path / "one")


class Standing(torch.Tensor):
    """A tensor without memory of its own, as those of 8-bit floats are: it stands for another one."""

    behind: torch.Tensor

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> Standing:
        made: Standing = torch.Tensor._make_wrapper_subclass(cls, behind.shape, dtype=behind.dtype)
        made.behind = behind
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = func(*(each.behind if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else found


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_a_tensor_without_memory_of_its_own_is_filled_by_a_copy(verify: str, tmp_path: Path) -> None:
    """Its address is 0: bytes that were read there ended the process."""
    source = {"small": torch.arange(6.0), "large": torch.arange(200_000.0), "plain": torch.arange(3.0)}
    with build_checkpointer("sync", [f"checkpoint.verify={verify}"]) as ours:
        ours.save(source, tmp_path / "one")
        behind = {key: torch.zeros_like(value) for key, value in source.items()}
        ours.load(
            tmp_path / "one", {key: Standing(value) if key != "plain" else value for key, value in behind.items()}
        )
    assert all(torch.equal(behind[key], value) for key, value in source.items())
