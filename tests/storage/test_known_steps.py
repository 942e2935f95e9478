"""What a run remembers of the checkpoints in its folder: nothing is read twice that has not changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.commit.scan import KnownSteps
from ckpt_component.core.storage.files import FileStorage


@pytest.fixture
def known(tmp_path: Path) -> KnownSteps:
    """Of a run that has three checkpoints."""
    usual = ["checkpoint.save.every_steps=1", "checkpoint.keep.last=null"]
    with build_manager("sync", usual, dir=tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.ones(step)})
    known = KnownSteps(FileStorage(), str(tmp_path), MEGATRON)
    assert known.update(os.listdir(tmp_path)) == {1, 2, 3} and sorted(known.scan.committed) == [1, 2, 3]
    return known


def manifest_of(known: KnownSteps, step: int) -> Any:
    return known.scan.manifests[step]


def test_a_manifest_is_decoded_again_only_if_it_was_modified(known: KnownSteps, tmp_path: Path) -> None:
    first = manifest_of(known, 2)
    known.look_again([2])
    assert manifest_of(known, 2) is first
    path = tmp_path / "iter_0000002" / MANIFEST
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    known.look_again([2])
    second = manifest_of(known, 2)
    assert second is not first and second == first
    known.look_again([2])
    assert manifest_of(known, 2) is second


def test_a_manifest_that_was_modified_counts_as_it_is_now(known: KnownSteps, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000002" / MANIFEST
    path.write_bytes(b"{")
    os.utime(path, ns=(0, 0))
    known.look_again([1, 2])
    assert sorted(known.scan.committed) == [1, 3] and known.scan.damaged.keys() == {2}


def test_manifests_that_are_not_kept_are_read_again(known: KnownSteps) -> None:
    last = manifest_of(known, 3)
    known.keep_manifests([3])
    assert known.scan.manifests.keys() == {3}
    known.look_again([1, 3])
    assert known.scan.manifests.keys() == {1, 3} and manifest_of(known, 3) is last


def test_a_step_that_comes_back_is_examined_again(known: KnownSteps, tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").rename(tmp_path / "away")
    assert known.update(os.listdir(tmp_path)) == set() and sorted(known.scan.committed) == [1, 3]
    (tmp_path / "away").rename(tmp_path / "iter_0000002")
    assert known.update(os.listdir(tmp_path)) == {2} and sorted(known.scan.committed) == [1, 2, 3]
