"""A file as `torch.save` writes it, of any Python object, at exactly the path of the save."""

from __future__ import annotations

import collections
import functools
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    build_checkpointer,
)
from ckpt_component.config import compose_checkpoint
from ckpt_component.writers import file_state

PRESETS = ["async_persistent", "async_temporal", "sync"]


def config_of(preset: str = "sync", **keys: Any) -> Any:
    config = compose_checkpoint(preset)
    config.writer = {"_target_": "ckpt_component.writers.TorchFileWriter", **keys}
    return config


def values() -> dict[str, Any]:
    module = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.BatchNorm1d(80))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 80)).sum().backward()
    optimizer.step()
    big = torch.randn(100, 100)
    return {
        "state_dict": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "module": module,
        "partial": functools.partial(torch.optim.Adam, lr=1),
        "counter": collections.Counter([1, 2, 2]),
        "views": [big, big[3:5], big.T],
        "parameter": torch.nn.Parameter(torch.ones(2000)),
        "half": torch.ones(3000, dtype=torch.bfloat16),
        "bits": torch.zeros(5000, dtype=torch.bool),
        "empty": torch.empty(0),
        "sparse": torch.eye(40).to_sparse(),
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.requires_grad, one.shape) == (other.dtype, other.requires_grad, other.shape)
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert getattr(one, "_metadata", None) == getattr(other, "_metadata", None)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.nn.Module):
        assert_same(one.state_dict(), other.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_torch_load_gives_what_torch_save_would_have_kept(preset: str, tmp_path: Path) -> None:
    path, reference, state = tmp_path / "x.ckpt", tmp_path / "y.ckpt", values()
    torch.save(state, reference)
    with build_checkpointer(config_of(preset)) as checkpointer:
        for _ in range(2):  # the second one over the first
            checkpointer.save(file_state(state), path)
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "y.ckpt"]
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=False, mmap=mapped)
        assert_same(loaded, torch.load(reference, weights_only=False))
        first, _, third = loaded["views"]
        assert first.data_ptr() == third.data_ptr()
        assert loaded["module"][0].weight.data_ptr() == loaded["state_dict"]["0.weight"].data_ptr()


def test_plain_values_load_safely_with_us_and_with_torch(tmp_path: Path) -> None:
    path, state = tmp_path / "x.ckpt", {key: values()[key] for key in ("state_dict", "optimizer", "half")}
    with build_checkpointer(config_of()) as checkpointer:
        checkpointer.save(file_state(state), path)
        assert_same(dict(torch.load(path, weights_only=True)), state)
        loaded = checkpointer.load(path)
    assert torch.equal(loaded["state_dict"]["0.weight"], state["state_dict"]["0.weight"])


def test_every_record_has_a_checksum_that_a_load_compares(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with build_checkpointer(config_of("async_persistent")) as checkpointer:
        checkpointer.save(file_state(values()), path)
        checkpointer.wait()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        places = [member.header_offset for member in archive.infolist() if member.file_size > 100]
    whole, draw = path.read_bytes(), random.Random(5)
    with build_checkpointer("sync") as checkpointer:
        for start in places:
            damaged = bytearray(whole)
            damaged[start + draw.randrange(100, 160)] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(CheckpointCorruptError):
                checkpointer.load(path)


def test_a_folder_at_the_path_is_not_replaced(tmp_path: Path) -> None:
    with build_checkpointer(config_of()) as checkpointer, pytest.raises(CheckpointExistsError, match="is a folder"):
        checkpointer.save(file_state({"a": torch.ones(3)}), tmp_path)


@pytest.mark.slow
def test_a_failure_of_any_operation_leaves_a_whole_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "x.ckpt"
    with build_checkpointer(config_of()) as checkpointer:
        checkpointer.save(file_state({"a": torch.ones(5000)}), path)
    failures = 0
    for number in range(1, 40):
        monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / f"operations-{number}"))
        monkeypatch.setenv("CKPT_FAILPOINT", f"any:nth={number}:action=raise:EIO")
        with build_checkpointer(config_of()) as checkpointer:
            try:
                checkpointer.save(file_state({"a": torch.zeros(5000)}), path)
            except CheckpointError:
                failures += 1
                assert os.listdir(folder) == ["x.ckpt"]
            assert torch.load(path)["a"].sum() in (0, 5000)
        if torch.load(path)["a"].sum() == 0 and failures < number:
            break
    assert failures >= 5 and torch.load(path)["a"].sum() == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointConfigError, match="crc32"):
        build_checkpointer(config_of(checksum="xxh3_64"))
    config = config_of()
    config.commit = "manifest"
    with pytest.raises(CheckpointConfigError, match="commit=rename"):
        build_checkpointer(config)
