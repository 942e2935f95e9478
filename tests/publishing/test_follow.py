"""`follow`: published weights in the process that uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import Source, assert_at, bytes_of, leftovers, stepped

from ckpt_component import CheckpointConfigError, CheckpointInUseError, CheckpointNotFoundError, CheckpointTimeoutError
from ckpt_component.publishing import Weights, follow


def arrays_of(weights: Weights) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights.arrays()}


def test_the_newest_version_and_each_newer_one(source: Source, folder: str) -> None:
    source.chain(1, 3)
    versions = follow(source.root, folder, poll_seconds=0.01, timeout=10)
    first = next(versions)
    assert (first.version, first.step, first.path, first.changed) == (3, 300, folder, None)
    assert arrays_of(first) == bytes_of(source.states[3])
    for number in (4, 5):
        source.delta(number, stepped(source.states[number - 1], number))
    second = next(versions)
    before, after = bytes_of(source.states[3]), bytes_of(source.states[5])
    assert second.version == 5 and arrays_of(second) == after
    assert second.changed is not None and {name for name in after if before[name] != after[name]} <= second.changed
    assert second.lag is not None and second.lag < 60 and 0 < second.nbytes < first.nbytes
    versions.close()
    assert_at(source, folder, 5)
    assert not leftovers(folder)


def test_the_first_version_of_a_folder_that_is_behind_may_have_changed_as_a_whole(source: Source, folder: str) -> None:
    source.chain(1, 2)
    next(versions := follow(source.root, folder, timeout=10))
    versions.close()
    source.delta(3, stepped(source.states[2], 3))
    weights = next(versions := follow(source.root, folder, timeout=10))
    assert (weights.version, weights.changed) == (3, None)
    versions.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_arrays_and_tensors_view_the_files(tmp_path: Path, folder: str, shards: int) -> None:
    source = Source(tmp_path / "to", shards)
    source.chain(1, 1)
    weights = next(versions := follow(source.root, folder, timeout=10))
    arrays, tensors = dict(weights.arrays()), dict(weights.tensors())
    assert arrays.keys() == tensors.keys() == source.states[1].keys()
    for name, value in source.states[1].items():
        assert arrays[name].dtype == value.dtype and np.array_equal(arrays[name], value)
        tensor = tensors[name]
        assert tuple(tensor.shape) == value.shape
        assert tensor.dtype == (torch.bfloat16 if value.dtype == np.uint16 else getattr(torch, str(value.dtype)))
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        assert np.array_equal(bits.numpy(), value)
    tensors["norm.weight"].fill_(3)
    arrays["norm.weight"][:] = 4
    assert arrays_of(weights) == bytes_of(source.states[1]), "a change of a view is not a change of the file"
    versions.close()


def test_a_view_keeps_its_bytes_when_newer_versions_come(source: Source, folder: str) -> None:
    source.chain(1, 1)
    versions = follow(source.root, folder, poll_seconds=0.01, timeout=10)
    kept = [name_and_array for name_and_array in next(versions).arrays()]
    for number in range(2, 6):
        source.delta(number, stepped(source.states[number - 1], number))
        assert arrays_of(next(versions)) == bytes_of(source.states[number])
    assert {name: array.tobytes() for name, array in kept} == bytes_of(source.states[1])
    versions.close()


def test_weights_that_were_replaced_say_so(source: Source, folder: str) -> None:
    source.chain(1, 1)
    versions = follow(source.root, folder, poll_seconds=0.01, timeout=10)
    first = next(versions)
    source.delta(2, stepped(source.states[1], 2))
    next(versions)
    with pytest.raises(CheckpointNotFoundError, match="has version 2 by now, not 1"):
        [*first.arrays()]
    versions.close()


def test_a_private_folder_is_deleted_at_the_end(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.chain(1, 2)
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    versions = follow(source.root, timeout=10)
    weights = next(versions)
    assert Path(weights.path).parent.parent == place and arrays_of(weights) == bytes_of(source.states[2])
    assert Path(weights.path).parent.stat().st_mode & 0o777 == 0o700
    versions.close()
    assert not [*place.iterdir()]


def test_an_error_in_the_loop_releases_the_folder(source: Source, folder: str) -> None:
    source.chain(1, 1)
    with pytest.raises(ZeroDivisionError):
        for weights in follow(source.root, folder, timeout=10):
            with pytest.raises(CheckpointInUseError):
                next(follow(source.root, folder, timeout=10))
            weights.version / 0
    next(versions := follow(source.root, folder, timeout=10))
    versions.close()


def test_a_source_without_a_version(source: Source, folder: str) -> None:
    with pytest.raises(CheckpointTimeoutError, match=r"No version came to .* within 0.2 s \(timeout\)"):
        next(follow(source.root, folder, poll_seconds=0.01, timeout=0.2))


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_poll_without_time(source: Source, seconds: Any) -> None:
    with pytest.raises(CheckpointConfigError, match="poll_seconds"):
        follow(source.root, poll_seconds=seconds)


def test_arrays_need_no_torch(source: Source, folder: str) -> None:
    source.chain(1, 2)
    code = f"""
import sys
from ckpt_component.publishing import follow
weights = next(follow({source.root!r}, {folder!r}, timeout=10))
print(len([*weights.arrays()]), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
    )
    assert done.stdout.split() == [str(len(source.states[2])), "False"], done.stderr
