"""A run that has not called `restore`: `begin_at`, or else its first save, settles what becomes of the steps there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_step, no_renames, unreadable

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointSaveError,
    CheckpointUnreadableError,
    build_manager,
)
from ckpt_component.core.commit.names import QUARANTINE_PREFIX
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import read_events

ANEW = ("checkpoint.resume=never", "checkpoint.rewind=true")


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


@pytest.mark.parametrize(("step", "begins"), [(0, "starts from scratch"), (1, "continues after step 1")])
def test_steps_that_follow_are_refused_in_words_that_say_how_the_run_begins(
    step: int, begins: str, tmp_path: Path
) -> None:
    saved(tmp_path, 1, 2)
    with (
        manager_in(tmp_path) as manager,
        pytest.raises(CheckpointExistsError, match=f"This run {begins}, and .* holds checkpoints of steps .*2"),
    ):
        manager.begin_at(step)


def test_only_steps_that_follow_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    with manager_in(tmp_path) as manager:
        assert manager.restore({"weight": torch.zeros(1000)}) == 2
    assert "although" not in caplog.text


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


def retired(root: Path) -> list[str]:
    return sorted(path.name.split(".")[2] for path in root.glob(f"{QUARANTINE_PREFIX}*"))


def test_a_first_save_with_never_and_rewind_retires_all_that_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    with manager_in(tmp_path, *ANEW) as manager:
        assert manager.save(3, {})
        assert manager.save(5, {})
        assert manager.steps() == [3, 5]
    assert retired(tmp_path) == ["iter_0000001", "iter_0000005"]


def test_a_first_save_with_never_alone_is_refused_beside_others(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    with manager_in(tmp_path, ANEW[0]) as manager:
        with pytest.raises(CheckpointExistsError, match="resume=never, and .* holds checkpoints of steps 1, 5"):
            manager.save(7, {})
        assert manager.steps() == [1, 5]


def test_before_a_first_save_what_cannot_be_retired_is_an_error_and_nothing_is_saved(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    with manager_in(tmp_path, *ANEW) as manager:
        with no_renames(), pytest.raises(CheckpointSaveError, match=r"could not retire 1, 5 .*Read-only") as caught:
            manager.save(7, {})
        assert caught.value.errno == errno.EROFS and manager.steps() == [1, 5]
        assert manager.save(7, {})
        assert manager.steps() == [7]


def test_before_a_first_save_a_folder_that_cannot_be_listed_is_an_error_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 5)
    names = FileStorage.names

    def fail(self: FileStorage, path: str, *rest: Any) -> list[str]:
        if path == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return names(self, path, *rest)

    with manager_in(tmp_path) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(FileStorage, "names", fail)
            with pytest.raises(CheckpointSaveError, match="cannot be listed: .*Input/output error") as caught:
                manager.save(3, {})
        assert caught.value.errno == errno.EIO
        with pytest.raises(CheckpointExistsError, match="Step 3 is the first that this run saves, .* step 5"):
            manager.save(3, {})
        assert manager.steps() == [1, 5]


def test_a_restore_from_a_folder_that_cannot_be_listed_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 5)

    def fail(self: FileStorage, path: str, *rest: Any) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with manager_in(tmp_path) as manager, monkeypatch.context() as patched:
        patched.setattr(FileStorage, "names", fail)
        with pytest.raises(CheckpointUnreadableError, match="cannot be listed: .* Start the run again") as caught:
            manager.restore({})
        with pytest.raises(CheckpointUnreadableError, match="cannot be listed: .* Start the run again"):
            manager.begin_at(5)
    assert caught.value.errno == errno.EIO
