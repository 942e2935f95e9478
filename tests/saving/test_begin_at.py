"""A program that loads a checkpoint by itself says so by `begin_at`: the checkpoint is verified before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_step, unreadable

from ckpt_component import CheckpointCorruptError, CheckpointManager, CheckpointUnreadableError, build_manager
from ckpt_component.events import read_events


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=null"]
    return build_manager("sync", [*usual, *overrides], dir=root)


def saved(root: Path, *steps: int) -> None:
    with manager_in(root) as manager:
        for step in steps:
            manager.save(step, {"weight": torch.full((1000,), float(step))})


def begun(root: Path, step: int) -> None:
    with manager_in(root) as manager:
        manager.begin_at(step)
        assert manager.save(step, {}) is False  # it is there
        assert manager.save(step + 1, {})


def origin(root: Path, step: int) -> Any:
    """The checkpoint that the run of a checkpoint began with."""
    return json.loads((root / f"iter_{step:07d}" / "manifest.json").read_text())["manifest"]["resumed_from"]


def test_a_whole_one_is_continued(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    begun(tmp_path, 2)
    with manager_in(tmp_path) as manager:
        assert manager.steps() == [1, 2, 3]
    assert origin(tmp_path, 3) == "iter_0000002"


def test_it_settles_what_becomes_of_other_steps_whatever_resume_says(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with manager_in(tmp_path, "checkpoint.resume=never") as manager:
        manager.begin_at(2)
        assert manager.save(3, {})
    assert manager.steps() == [1, 2, 3]


def test_a_run_from_scratch_has_no_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        manager.begin_at(0)
        assert manager.save(1, {})
    assert origin(tmp_path, 1) is None


def test_a_damaged_one_is_set_aside_if_there_is_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip_step(tmp_path, 2)
    with manager_in(tmp_path, "checkpoint.verify=off") as manager:
        manager.begin_at(2)  # nobody looks
    with pytest.raises(CheckpointCorruptError, match="step 2 is damaged; it is now kept as .* from step 1") as caught:
        begun(tmp_path, 2)
    (kept,) = tmp_path.glob(".ckpt-quarantine.iter_0000002.*")
    assert str(kept) in str(caught.value)
    noted = [event for event in read_events(tmp_path) if event["event"] == "quarantine"]
    assert [(event["step"], event["path"]) for event in noted] == [(2, str(kept))]
    begun(tmp_path, 1)


def test_with_two_tiers_each_is_verified_where_it_is(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    saved(slow, 1, 2)
    saved(fast, 3)
    for step, root in ((3, fast), (2, slow)):
        flip_step(root, step)
        told = pytest.raises(CheckpointCorruptError, match=f"step {step} is damaged; it is now kept as {root}/")
        with manager_in(slow, f"checkpoint.local.dir={fast}") as manager, told:
            manager.begin_at(step)


@pytest.mark.parametrize("damage", ["a_bit", "its_manifest", "no_manifest"])
def test_the_only_one_is_never_renamed(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    if damage == "a_bit":
        flip_step(tmp_path, 1)
    elif damage == "its_manifest":
        (tmp_path / "iter_0000001" / "manifest.json").write_bytes(b"{")
    else:
        (tmp_path / "iter_0000001" / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointCorruptError, match="step 1 is damaged; resume from another checkpoint"):
            begun(tmp_path, 1)
    assert (tmp_path / "iter_0000001").is_dir() and not any(tmp_path.glob(".ckpt-quarantine.*"))


def test_one_that_cannot_be_read_is_an_error_and_stays(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with unreadable(tmp_path, 2), pytest.raises(CheckpointUnreadableError, match="Input/output error"):
        begun(tmp_path, 2)
    assert not any(tmp_path.glob(".ckpt-quarantine.*"))
    begun(tmp_path, 2)  # the disk is back
