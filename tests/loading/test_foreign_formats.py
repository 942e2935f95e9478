"""Folders of Hugging Face and Megatron and files of Lightning, as those write them; and such that they do not write."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import arange, ones, zeros
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    SyncCheckpointer,
    build_checkpointer,
    build_manager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
WEIGHTS = {f"h.{number}.w": arange(4.0) + number for number in range(6)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def ours() -> Iterator[SyncCheckpointer]:
    with build_checkpointer("sync") as checkpointer:
        assert isinstance(checkpointer, SyncCheckpointer)
        yield checkpointer


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder as of save_pretrained(max_shard_size=...)."""
    folder = tmp_path / "hf"
    folder.mkdir()
    keys = [*WEIGHTS]
    for number, name in enumerate(NAMES):
        save_file({key: WEIGHTS[key] for key in keys[2 * number : 2 * number + 2]}, folder / name, {"format": "pt"})
    weight_map = {key: NAMES[number // 2] for number, key in enumerate(keys)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    torch.save({"lr": 1}, folder / "training_args.bin")
    return folder


def assert_weights(loaded: dict[str, Any]) -> None:
    assert loaded.keys() == WEIGHTS.keys() and all(torch.equal(loaded[key], WEIGHTS[key]) for key in WEIGHTS)


def test_a_sharded_folder_of_hugging_face(sharded: Path, ours: SyncCheckpointer) -> None:
    assert_weights(ours.load(sharded))
    target = {key: zeros(4) for key in WEIGHTS}
    assert_weights(ours.load(sharded, target, strict=True, allow_unexpected=False))


def test_a_folder_with_one_file_of_weights(sharded: Path, ours: SyncCheckpointer) -> None:
    for path in sharded.glob("model*"):
        path.unlink()
    save_file(WEIGHTS, sharded / "model.safetensors")
    for name in ("optimizer.pt", "rng_state.pth", "pytorch_model.bin"):
        torch.save({"other": ones(1)}, sharded / name)
    assert_weights(ours.load(sharded))
    (sharded / "model.safetensors").unlink()
    assert [*ours.load(sharded)] == ["other"]
    (sharded / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint .*name the folder of one"):
        ours.load(sharded)


@pytest.fixture
def hub(sharded: Path) -> Path:
    """The same in the cache of the hub, where all names are links."""
    snapshot = sharded.parent / "models--me--it" / "snapshots" / "0a1b"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / f"hash{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{number}")
    return snapshot


def test_the_cache_of_the_hub(hub: Path, ours: SyncCheckpointer) -> None:
    assert_weights(ours.load(hub))
    assert [*ours.load(hub / NAMES[0])] == ["h.0.w", "h.1.w"]
    (hub.parent.parent / "refs").mkdir()
    (hub.parent.parent / "refs" / "main").symlink_to(hub)
    assert_weights(ours.load(hub.parent.parent / "refs" / "main"))


@pytest.mark.parametrize(
    "link", ["../../outside", "../../blobs/../outside", "/etc/hostname", "../../blobs/more/x", "x"]
)
def test_no_other_link_is_followed(link: str, hub: Path, ours: SyncCheckpointer) -> None:
    for name in (NAMES[1], INDEX):
        place = (hub / name).readlink()
        (hub.parent.parent / "outside").write_bytes((hub / name).read_bytes())
        (hub / name).unlink()
        (hub / name).symlink_to(link)
        with pytest.raises(CheckpointCorruptError):
            ours.load(hub)
        (hub / name).unlink()
        (hub / name).symlink_to(place)
    hub.rename(hub.parent.with_name("other"))
    with pytest.raises(CheckpointCorruptError, match="not a regular file"):
        ours.load(hub.parent.with_name("other"))


def in_map(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        for key, name in changes.items():
            content["weight_map"][key.replace("_", ".")] = name
        (folder / INDEX).write_text(json.dumps(content))

    return change


def text(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / INDEX).write_text(content)

    return write


def second_copy(folder: Path) -> None:
    save_file({"h.4.w": zeros(4), "h.5.w": zeros(4), "h.0.w": zeros(4)}, folder / NAMES[2])


def unlisted(folder: Path) -> None:
    save_file({"h.4.w": zeros(4), "h.5.w": zeros(4), "x": zeros(4)}, folder / NAMES[2])


def missing(folder: Path) -> None:
    (folder / NAMES[1]).unlink()


def linked(folder: Path) -> None:
    (folder / NAMES[1]).rename(folder / "kept")
    (folder / NAMES[1]).symlink_to("kept")


def fifo(folder: Path) -> None:
    missing(folder)
    os.mkfifo(folder / NAMES[1])


BAD_INDEX: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file outside": (in_map(h_0_w="../outside.safetensors"), "not a plain name"),
    "an absolute file": (in_map(h_0_w="/etc/hostname"), "not a plain name"),
    "a file that is a number": (in_map(h_0_w=3), "not a plain name"),
    "no file": (in_map(h_0_w=""), "not a plain name"),
    "another file": (in_map(h_0_w=NAMES[1]), f"'h.0.w' is in .*{NAMES[0]}, and the index of .* has it in '{NAMES[1]}'"),
    "a key that no file has": (in_map(x=NAMES[1]), "The index of .* lists 'x', and no file there has it"),
    "a file that is not there": (in_map(x="model-9.safetensors"), "model-9.safetensors cannot be read: No such file"),
    "a shard is missing": (missing, f"{NAMES[1]} cannot be read: No such file"),
    "a shard is a link": (linked, "not a regular file"),
    "a shard is a FIFO": (fifo, "not a regular file"),
    "a key in two shards": (second_copy, f"'h.0.w' in .* is in two files, {NAMES[0]} and {NAMES[2]}"),
    "a key that the index lacks": (unlisted, f"'x' is in .*{NAMES[2]}, and the index of .* does not have it"),
    "not JSON": (text("{"), "is not an index with a weight_map"),
    "a list": (text("[]"), "is not an index with a weight_map"),
    "no map": (text("{}"), "is not an index with a weight_map"),
    "a map that is a list": (text('{"weight_map": ["a"]}'), "is not an index with a weight_map"),
    "an empty map": (text('{"weight_map": {}}'), "has an empty weight_map"),
    "a key twice": (text(f'{{"weight_map": {{"a": "{NAMES[0]}", "a": "{NAMES[1]}"}}}}'), "is not an index"),
    "deep": (text("[" * 100_000), "is not an index"),
}


@pytest.mark.parametrize("case", sorted(BAD_INDEX))
def test_an_index_that_cannot_be(case: str, sharded: Path, ours: SyncCheckpointer) -> None:
    change, message = BAD_INDEX[case]
    change(sharded)
    for target in (None, {"h.0.w": zeros(4)}):
        with pytest.raises(CheckpointCorruptError, match=message):
            ours.load(sharded, target)


# Lightning


class Custom:
    """What hyperparameters hold."""


def lightning_file(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: Any) -> None:
    """The structure of Trainer.save_checkpoint in Lightning 2.6."""
    torch.save(
        {
            "epoch": 2,
            "global_step": 30,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "x", "kth_value": torch.tensor(1.0)}},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": {"width": 3, **extra},
        },
        path,
    )


def trained() -> tuple[torch.nn.Linear, torch.optim.Adam]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


EXTRA: dict[str, Any] = {
    "args": argparse.Namespace(lr=0.1, inner=[pathlib.PurePosixPath("x")]),
    "partial": functools.partial(torch.optim.Adam, lr=1.0),
    "class": torch.nn.Linear,
    "own": [Custom(), 1],
}


@pytest.mark.parametrize("extra", [{}, EXTRA], ids=["plain", "objects"])
def test_the_weights_of_a_lightning_file(extra: Any, ours: SyncCheckpointer, tmp_path: Path) -> None:
    model, optimizer = trained()
    lightning_file(tmp_path / "last.ckpt", model, optimizer, extra)
    plain, wrapped = torch.nn.Linear(3, 2), {"net": torch.nn.Linear(3, 2)}
    ours.load(tmp_path / "last.ckpt", plain, strict=True, rename={"state_dict.model": ""})
    ours.load(tmp_path, wrapped, strict=True, rename={"state_dict.model": "net"})
    assert torch.equal(plain.weight, model.weight) and torch.equal(wrapped["net"].bias, model.bias)
    state: dict[str, Any] = {"model": (other := trained())[0], "optimizer": other[1], "global_step": 0, "loops": {}}
    state["optimizer"].param_groups[0]["lr"] = 9.0
    rename = {"state_dict.model": "model", "optimizer_states.0": "optimizer"}
    ours.load(tmp_path / "last.ckpt", state, strict=True, rename=rename)
    assert state["global_step"] == 30 and state["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] == 3
    assert torch.equal(state["model"].weight, model.weight) and state["optimizer"].param_groups[0]["lr"] == 0.25
    moments = [each.state[next(iter(each.state))]["exp_avg"] for each in (state["optimizer"], optimizer)]
    assert torch.equal(*moments)


def test_objects_of_a_lightning_file_are_left_out_by_name(
    ours: SyncCheckpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lightning_file(tmp_path / "last.ckpt", *trained(), {**EXTRA, "counts": collections.defaultdict(int, a=1)})
    loaded = ours.load(tmp_path / "last.ckpt")
    assert loaded["hyper_parameters"] == {"width": 3, "counts": {"a": 1}} and loaded["epoch"] == 2
    told = next(text for text in caplog.messages if "safe loading" in text)
    assert "4 value(s) are objects that safe loading does not create, and are left out" in told
    for name in ("args (argparse.Namespace)", "partial (functools.partial)", "class (torch.nn.modules.linear.Linear)"):
        assert f"hyper_parameters.{name}" in told
    target: dict[str, Any] = {"hyper_parameters": {}}
    with pytest.raises(
        CheckpointLoadError, match=r"'hyper_parameters\.args' is a argparse\.Namespace in .*; .* in ignore"
    ):
        ours.load(tmp_path / "last.ckpt", target)
    names = [f"hyper_parameters.{key}" for key in EXTRA]
    ours.load(tmp_path / "last.ckpt", target, strict=True, ignore=names)
    assert target["hyper_parameters"]["width"] == 3


def test_a_file_of_a_whole_object_says_so(ours: SyncCheckpointer, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(
        CheckpointLoadError, match=r"holds a torch.nn.modules.linear.Linear, .* If you trust the file, "
    ):
        ours.load(tmp_path / "x.pt")


def test_classes_of_a_file_are_not_made_nor_kept(ours: SyncCheckpointer, tmp_path: Path) -> None:
    calls: list[int] = []

    class Loud:
        def __setstate__(self, state: Any) -> None:
            calls.append(1)

    Loud.__qualname__ = "Loud"
    globals()["Loud"] = Loud
    value = Loud()
    value.x = 1  # type: ignore[attr-defined]
    torch.save({"a": value, "w": ones(1)}, tmp_path / "x.pt")
    before = torch.serialization.get_safe_globals()
    assert [*ours.load(tmp_path / "x.pt")] == ["w"] and not calls
    assert set(torch.serialization.get_safe_globals()) == set(before)


# Megatron


class Planner(DefaultSavePlanner):
    """Writes bytes as they are, as Megatron's does."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def as_bytes(value: Any) -> io.BytesIO:
    torch.save([value], stream := io.BytesIO())
    return stream


COMMON = {
    "iteration": 100,
    "args": argparse.Namespace(lr=1),
    "optimizer": {"param_groups": [{"lr": 0.1, "betas": (1, 2)}]},
}


@pytest.fixture(params=["common.pt", "common_state"])
def megatron(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root with one checkpoint, with the common values where 0.16 and where 0.19 have them."""
    root = tmp_path / "mcore"
    folder = root / "iter_0000100"
    state: dict[str, Any] = {
        "decoder.layers.self_attention.linear_qkv.weight": arange(12.0).view(2, 3, 2),
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight": ones(2, 3, 2),
        "rng_state/shard_0.0_1.2": as_bytes({"seed": 1, "cuda": ones(2)}),
        "decoder._extra_state/shard_0_1": as_bytes(io.BytesIO(b"x")),
    }
    if request.param == "common_state":
        state["common_state/shard_0_1"] = as_bytes(COMMON)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, planner=Planner(flatten_state_dict=False))
    if request.param == "common.pt":
        torch.save(COMMON, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def test_a_checkpoint_of_megatron(megatron: Path, ours: SyncCheckpointer, caplog: pytest.LogCaptureFixture) -> None:
    for path in (megatron, megatron / "iter_0000100"):
        caplog.clear()
        loaded = ours.load(path)
        assert loaded.pop("rng_state/shard_0.0_1.2")["seed"] == 1
        assert loaded.pop("optimizer") == {"param_groups": [{"lr": 0.1, "betas": (1, 2)}]}
        assert loaded.pop("iteration") == 100
        assert sorted(map(tuple, map(torch.Tensor.size, loaded.values()))) == [(2, 3, 2)] * 2
        assert "2 value(s) are objects" in caplog.text and "args (argparse.Namespace)" in caplog.text
        qkv = zeros(2, 3, 2)
        target = {"model": {"qkv": qkv}, "iteration": 0, "optimizer": {"param_groups": [{"lr": 0.0}]}}
        ours.load(path, target, strict=True, rename={"decoder.layers.self_attention.linear_qkv.weight": "model.qkv"})
        assert torch.equal(qkv, arange(12.0).view(2, 3, 2)) and target["iteration"] == 100
        assert target["optimizer"] == {"param_groups": [{"lr": 0.1}]}


def test_a_run_resumes_from_megatrons_folder(megatron: Path, tmp_path: Path) -> None:
    for path in (megatron, megatron / "iter_0000100"):
        qkv = zeros(2, 3, 2)
        changes = [f"checkpoint.resume={path}", "checkpoint.save.at_end=false"]
        with build_manager("sync", changes, dir=tmp_path / "run") as manager:
            assert manager.restore({"qkv": qkv}, rename={"decoder.*.linear_qkv.weight": "q*kv"}, strict=False) == 100
            assert (
                manager.restore({"qkv": qkv}, rename={"decoder.layers.self_attention.linear_qkv.weight": "qkv"}) == 100
            )
        assert qkv.any()


def test_parts_of_a_megatron_folder_that_contradict_each_other(megatron: Path, ours: SyncCheckpointer) -> None:
    folder = megatron / "iter_0000100"
    if (folder / "common.pt").exists():
        torch.save({"decoder.layers.self_attention.linear_qkv.weight": 1}, folder / "common.pt")
        with pytest.raises(
            CheckpointCorruptError, match=r"linear_qkv\.weight' is stored twice, in .* and in .*common\.pt"
        ):
            ours.load(folder)
        torch.save([1], folder / "common.pt")
        with pytest.raises(CheckpointLoadError, match=r"common\.pt holds a list, not a state dict"):
            ours.load(folder)
    (megatron / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        ours.load(megatron)


def test_a_folder_of_our_checkpoints_is_its_newest(ours: SyncCheckpointer, tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"step": step})
    assert ours.load(tmp_path) == {"step": 2}
