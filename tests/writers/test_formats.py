"""Layouts: balance, separate files, shared storages, directories beyond 4 GiB, and refusals."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointConfigError, CheckpointStageError, build_checkpointer
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.formats.writer import balanced
from ckpt_component.formats.zip_records import central_header, end_of_directory, local_header


def save(state: dict[str, Any], path: Path, *overrides: str) -> list[str]:
    with build_checkpointer("sync", list(overrides)) as checkpointer:
        checkpointer.save(state, path)
    return sorted(os.listdir(path))


def test_balanced_groups() -> None:
    sizes = [5, 4, 3, 3, 3]
    assert sorted(sum(sizes[number] for number in group) for group in balanced(sizes, 2)) == [8, 10]
    assert balanced([], 3) == []
    assert balanced([1], 3) == [[0]]


def test_keys_with_the_hint_go_to_files_of_their_own(tmp_path: Path) -> None:
    state = {"model": {"a": torch.zeros(10), "b": torch.zeros(10)}, "optimizer": {"a": torch.zeros(20)}, "n": 1}
    names = save(state, tmp_path / "one", "checkpoint.writer.separation_hint=model")
    assert [name for name in names if name.endswith(".distcp")] == ["__0_0.distcp", "__0_2.distcp", "model__0_1.distcp"]
    import torch.distributed.checkpoint as dcp

    target = {"model": {"a": torch.ones(10), "b": torch.ones(10)}, "optimizer": {"a": torch.ones(20)}, "n": 0}
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "one")
    assert target["n"] == 1 and target["model"]["b"].eq(0).all()  # type: ignore[index]


def test_a_hint_needs_two_workers_and_a_plain_name() -> None:
    with pytest.raises(CheckpointConfigError, match="at least two files"):
        DcpWriter(workers=1, separation_hint="model")
    with pytest.raises(CheckpointConfigError, match="becomes part of file names"):
        DcpWriter(workers=2, separation_hint="../x")
    with pytest.raises(CheckpointConfigError, match="must be from 1 to 128, got 0"):
        DcpWriter(workers=0)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_overlapping_tensors_are_stored_once_and_share_memory_after_torch_load(workers: int, tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    state = {"all": base, "part": base[10:20], "turned": base.view(1000, 100).t(), "alone": base[::2], "n": 1}
    save(state, tmp_path / "one", "checkpoint/writer=torch_save", f"checkpoint.writer.workers={workers}")
    path = tmp_path / "one" / "checkpoint_0.pt"
    assert path.stat().st_size < 1.6 * base.nbytes  # once, and half of it again for the view with gaps
    loaded = torch.load(path, weights_only=True, mmap=True)
    for key in ("all", "part", "turned", "alone"):
        assert torch.equal(loaded[key], state[key])  # type: ignore[arg-type]
    assert loaded["all"].untyped_storage().data_ptr() == loaded["part"].untyped_storage().data_ptr()
    assert {name.split("/")[-1] for name in zipfile.ZipFile(path).namelist()} >= {"data.pkl", "version", "byteorder"}


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
def test_a_view_of_a_large_storage_stores_only_the_view(writer: str, tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    save({"view": large[5:15]}, tmp_path / "one", f"checkpoint/writer={writer}")
    assert sum(file.stat().st_size for file in (tmp_path / "one").iterdir()) < 20_000


def test_safetensors_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(CheckpointStageError, match="tensors only, and 'n', 's' are not"):
        save({"a": torch.ones(1), "n": 1, "s": "x"}, tmp_path / "one", "checkpoint/writer=safetensors")
    with pytest.raises(CheckpointStageError, match="'a' is complex128"):
        save({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "two", "checkpoint/writer=safetensors")


def test_records_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    size = 5 << 30
    first = local_header("data/0", size, 0)
    second_at = len(first) + size
    second = local_header("data/1", 4, second_at)
    directory = central_header("data/0", size, 0) + central_header("data/1", 4, second_at)
    third_at = second_at + len(second) + 4
    third = local_header("version", 2, third_at)
    directory += central_header("version", 2, third_at)
    end = third_at + len(third) + 2
    path = tmp_path / "sparse.zip"
    with open(path, "wb") as stream:
        for position, data in (
            (0, first),
            (second_at, second + b"abcd" + third + b"3\n"),
            (end, directory + end_of_directory(3, len(directory), end)),
        ):
            stream.seek(position)
            stream.write(data)
    with zipfile.ZipFile(path) as archive:
        found = {entry.filename: (entry.file_size, entry.header_offset) for entry in archive.infolist()}
    assert found == {"archive/data/0": (size, 0), "archive/data/1": (4, second_at), "archive/version": (2, third_at)}
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/1") == second_at + len(second)
