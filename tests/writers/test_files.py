"""`FilesWriter`: the files of other programs, as torch and safetensors read them; and runs that load by themselves."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import Packed
from safetensors.torch import load_file

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointLoadError,
    CheckpointManager,
    CheckpointStageError,
    build_checkpointer,
    build_manager,
    compose_checkpoint,
)

np = pytest.importorskip("numpy")


def config(preset: str, *overrides: str) -> Any:
    composed = compose_checkpoint(preset, overrides)
    composed.writer = {"_target_": "ckpt_component.writers.FilesWriter", "workers": 2}
    return composed


def files(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(40, 30)
    return {
        "model.safetensors": OrderedDict(weight=weight, half=weight.half(), bias=torch.randn(7)),
        "optimizer.pt": {
            # Shared with the model's file: each file has its own bytes. `part` overlaps: one storage in the file.
            "state": {0: {"step": torch.tensor(float(seed)), "average": weight, "part": weight[3:9]}},
            "param_groups": [{"lr": np.float64(seed / 8), "betas": (0.9, 0.99), "params": [0]}],
        },
        "scheduler.pt": {"last_epoch": seed, "empty": {}},
        "config.json": b'{"seed": %d}' % seed * (seed + 1),
        "marker": b"",
    }


def check(folder: Path, seed: int) -> None:
    expected = files(seed)
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == set(expected["model.safetensors"])
    assert all(torch.equal(tensors[key], value) for key, value in expected["model.safetensors"].items())
    archive = torch.load(folder / "optimizer.pt", weights_only=False)
    group = archive["param_groups"][0]
    assert group == {"lr": seed / 8, "betas": (0.9, 0.99), "params": [0]} and type(group["lr"]) is np.float64
    state = archive["state"][0]
    assert all(torch.equal(state[key], value) for key, value in expected["optimizer.pt"]["state"][0].items())
    assert state["part"].untyped_storage().data_ptr() == state["average"].untyped_storage().data_ptr()
    assert torch.load(folder / "scheduler.pt", weights_only=True) == {"last_epoch": seed, "empty": {}}
    assert (folder / "config.json").read_bytes() == expected["config.json"]
    assert (folder / "marker").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async_persistent", "async_zero_overhead"])
def test_every_key_of_the_state_is_a_file(tmp_path: Path, preset: str) -> None:
    with build_checkpointer(config(preset)) as checkpointer:
        for seed in (1, 2):
            checkpointer.save(files(seed), tmp_path / str(seed))
    for seed in (1, 2):
        check(tmp_path / str(seed), seed)
        assert checkpointer.verify(tmp_path / str(seed))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "config.json", "integrity-0.json"]
)
def test_a_changed_byte_is_found_in_any_file(tmp_path: Path, name: str) -> None:
    with build_checkpointer(config("sync")) as checkpointer:
        checkpointer.save(files(1), tmp_path / "one")
        data = bytearray((tmp_path / "one" / name).read_bytes())
        data[-5] ^= 1
        (tmp_path / "one" / name).write_bytes(data)
        with pytest.raises(CheckpointCorruptError, match=name):
            checkpointer.verify(tmp_path / "one")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a/b.pt": b""}, "'a/b.pt' is not a name"),
        ({"manifest.json": b""}, "'manifest.json' is not a name"),
        ({3: {"x": 1}}, "3 is not a name"),
        ({"model.pt": torch.ones(1)}, "'model.pt' is a tensor, and the value of a file is a dict"),
        ({"config.json": "{}"}, "'config.json' is a str"),
        ({"model.safetensors": {"x": torch.ones(1), "epoch": 1}}, "'epoch'"),
    ],
)
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, state: dict[Any, Any], text: str) -> None:
    with build_checkpointer(config("sync")) as checkpointer, pytest.raises(CheckpointStageError, match=text):
        checkpointer.save(state, tmp_path / "one")
    assert os.listdir(tmp_path) == []


def test_a_load_says_which_files_there_are(tmp_path: Path) -> None:
    with build_checkpointer(config("sync")) as checkpointer:
        checkpointer.save(files(1), tmp_path / "one")
        with pytest.raises(CheckpointLoadError, match="load one of them: model.safetensors, optimizer.pt"):
            checkpointer.load(tmp_path / "one")
        assert torch.equal(
            checkpointer.load(tmp_path / "one" / "model.safetensors")["bias"], files(1)["model.safetensors"]["bias"]
        )


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.naming=huggingface", "checkpoint.keep.last=null", *overrides]
    return build_manager(config("async_persistent", *usual), dir=root)


def saved(root: Path, *steps: int) -> Path:
    with manager_in(root) as manager:
        manager.begin_at(0)
        for step in steps:
            manager.save(step, files(step))
    return root


@pytest.mark.slow
def test_a_program_that_loads_by_itself_begins_at_its_step(tmp_path: Path) -> None:
    with manager_in(saved(tmp_path, 5, 10)) as manager:
        manager.begin_at(10)
        assert not manager.save(10, files(10)), "it is saved already"
        manager.save(15, files(15))
    assert [(report.step, report.outcome) for report in manager.reports] == [(15, "committed")]
    check(tmp_path / "checkpoint-15", 15)


@pytest.mark.slow
def test_steps_that_follow_are_refused_or_retired(tmp_path: Path) -> None:
    (saved(tmp_path, 5, 10) / "checkpoint-20").mkdir()  # another program's
    (tmp_path / "checkpoint-20" / "config.json").write_text("{}")
    with manager_in(tmp_path) as manager:
        with pytest.raises(
            CheckpointExistsError, match="continues after step 5, .* holds checkpoints of steps 10, 20. "
        ):
            manager.begin_at(5)
        with pytest.raises(CheckpointExistsError, match="starts from scratch, .* 5, 10, 20. "):
            manager.begin_at(0)
    with manager_in(tmp_path, "checkpoint.rewind=true") as manager:
        manager.begin_at(5)
        assert manager.steps() == [5]
        manager.save(10, files(10))
    check(tmp_path / "checkpoint-10", 10)


def test_a_damaged_checkpoint_is_set_aside_if_there_is_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    for step in (10, 5):
        with open(tmp_path / f"checkpoint-{step}" / "optimizer.pt", "r+b") as file:
            file.seek(200)
            file.write(b"!")
    with manager_in(tmp_path) as manager:
        with pytest.raises(
            CheckpointCorruptError, match="step 10 is damaged; it is now kept as .* resumes from step 5"
        ):
            manager.begin_at(10)
        assert manager.steps() == [5]
        with pytest.raises(
            CheckpointCorruptError, match="step 5 is damaged; resume from another checkpoint. .*optimizer.pt"
        ):
            manager.begin_at(5)
        assert manager.steps() == [5], "it may be all there is"


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_tensor_made_of_tensors_is_refused_by_key(name: str, tmp_path: Path) -> None:
    state = {name: {"w": Packed.of(torch.ones(8)), "v": torch.ones(2)}}
    with build_checkpointer(config("sync")) as checkpointer, pytest.raises(CheckpointStageError) as caught:
        checkpointer.save(state, tmp_path / "one")
    assert str(caught.value).startswith(f"'{name}.w' is made of tensors, and the program that loads {name} would not")
