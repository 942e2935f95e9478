"""What a resuming run does with what it finds: damaged checkpoints, the pointer file, leftovers, folders of other programs."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_step, no_renames, unreadable
from forging import edit_manifest
from inside import tidied
from rank_threads import rank_threads
from ranks import run_ranks

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointLoadError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.commit.cleanup import RetentionPolicy, discard, wait_for_writers
from ckpt_component.core.commit.commit import begin, new_attempt
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.names import MEGATRON, QUARANTINE_PREFIX
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.outside import Outside
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.events import CheckpointListener, LoadReport
from ckpt_component.managing.policies import ResumePolicy
from ckpt_component.managing.restore import Restorer
from ckpt_component.managing.run_context import RunContext, steps_text
from ckpt_component.managing.run_folder import RunFolder

POINTER = "latest_checkpointed_iteration.txt"
SCRIPT = Path(__file__).parent / "scripts" / "damaged_resume.py"


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    return build_manager(
        "sync", ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", *overrides], dir=root
    )


#: Beside it a step or `never` may be named where other steps follow.
RESTORES_ONLY = "checkpoint.save.every_steps=null"


def target() -> dict[str, Any]:
    return {"weight": torch.zeros(1000), "step": 0}


def run(root: Path, *steps: int) -> None:
    with manager_in(root, "checkpoint.keep.last=null") as manager:
        for step in steps:
            manager.save(step, {"weight": torch.full((1000,), float(step)), "step": step})


def restored(root: Path, *overrides: str) -> int | None:
    state = target()
    with manager_in(root, *overrides) as manager:
        step = manager.restore(state)
    assert step is None or (state["step"] == step and state["weight"].eq(step).all())
    return step


def quarantined(root: Path) -> list[str]:
    names = [path.name for path in root.iterdir() if path.name.startswith(QUARANTINE_PREFIX)]
    return sorted(name.removeprefix(QUARANTINE_PREFIX).partition(".")[0] for name in names)


def test_a_damaged_newest_checkpoint_is_quarantined_and_its_step_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, 2, 3)
    flip_step(tmp_path, 3)
    bytes_before = (tmp_path / "iter_0000003" / "__0_0.distcp").read_bytes()
    assert restored(tmp_path) == 2
    assert "step 3 cannot be used, trying step 2" in caplog.text and "it is kept as" in caplog.text
    assert quarantined(tmp_path) == ["iter_0000003"]
    (kept,) = [path for path in tmp_path.iterdir() if path.name.startswith(QUARANTINE_PREFIX)]
    assert (kept / "__0_0.distcp").read_bytes() == bytes_before
    assert (tmp_path / POINTER).read_text() == "2"
    with manager_in(tmp_path, "checkpoint.keep.last=1") as manager:
        assert manager.restore(target()) == 2
        manager.save(3, {"weight": torch.full((1000,), 3.0), "step": 3})
        manager.save(4, {"weight": torch.full((1000,), 4.0), "step": 4})
    assert manager.steps() == [4]
    # Neither counted nor deleted.
    assert quarantined(tmp_path) == ["iter_0000003"] and restored(tmp_path) == 4


def test_several_damaged_ones_are_passed_over_together(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        flip_step(tmp_path, step)
    (tmp_path / "iter_0000002" / "manifest.json").write_bytes(b"{")
    assert restored(tmp_path) == 1
    assert quarantined(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004"]


def test_the_only_checkpoint_is_never_renamed(tmp_path: Path) -> None:
    """There is nothing to fall back to: to begin from scratch would hide that all is lost."""
    run(tmp_path, 1)
    flip_step(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is damaged"):
            restored(tmp_path)
    for overrides in ([], ["checkpoint.resume=must"]):
        (tmp_path / "iter_0000001" / "manifest.json").write_bytes(b"{")
        with pytest.raises(CheckpointCorruptError, match=r"none that can be used.*manifest\.json"):
            restored(tmp_path, *overrides)
    with pytest.raises(CheckpointExistsError, match="checkpoint.resume=never, and .* holds checkpoints of step 1"):
        restored(tmp_path, "checkpoint.resume=never")
    assert restored(tmp_path, "checkpoint.resume=never", RESTORES_ONLY) is None
    assert quarantined(tmp_path) == [] and (tmp_path / "iter_0000001").is_dir()


def test_a_step_that_was_asked_for_is_never_renamed(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3)
    flip_step(tmp_path, 3)
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is damaged"):
        restored(tmp_path, "checkpoint.resume=3")
    (tmp_path / "iter_0000002" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"checkpoint.resume=2, .*__0_0\.distcp is missing"):
        restored(tmp_path, "checkpoint.resume=2")
    with pytest.raises(CheckpointNotFoundError, match="resume=7"):
        restored(tmp_path, "checkpoint.resume=7")
    assert restored(tmp_path, "checkpoint.resume=1", RESTORES_ONLY) == 1
    assert quarantined(tmp_path) == [] and restored(tmp_path, "checkpoint.resume=never", RESTORES_ONLY) is None


def test_what_cannot_be_read_is_passed_over_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk or a mount that fails says nothing about the bytes."""
    run(tmp_path, 1, 2)
    with unreadable(tmp_path, 2):
        assert restored(tmp_path) == 1
        assert "step 2 cannot be used, trying step 1" in caplog.text
        with pytest.raises(CheckpointUnreadableError, match="Input/output error"):
            restored(tmp_path, "checkpoint.resume=2")
    assert quarantined(tmp_path) == []
    assert restored(tmp_path) == 2  # the disk is back


def test_what_was_found_damaged_and_cannot_be_read_again_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk that fails now may have failed then."""
    run(tmp_path, 1, 2)
    flip_step(tmp_path, 2)
    with unreadable(tmp_path, 2, lambda: "step 2 cannot be used, trying step 1" in caplog.text):
        assert restored(tmp_path) == 1
    assert "iter_0000002 cannot be verified again: " in caplog.text and quarantined(tmp_path) == []


def test_with_two_tiers_each_checkpoint_is_read_and_quarantined_where_it_is(tmp_path: Path) -> None:
    local, other, slow = f"checkpoint.local.dir={tmp_path / 'fast'}", tmp_path / "other", tmp_path / "slow"
    run(other, 7)
    path = f"checkpoint.resume={other / 'iter_0000007'}"
    with manager_in(slow, local, path, RESTORES_ONLY) as manager:
        assert manager.restore(target()) == 7
    run(slow, 1, 2)
    flip_step(slow, 2)
    assert restored(slow, local, RESTORES_ONLY) == 1
    assert quarantined(slow) == ["iter_0000002"]


def test_damaged_ones_before_the_restored_step_are_quarantined_also_where_those_after_it_are_retired(
    tmp_path: Path,
) -> None:
    run(tmp_path, 1, 2, 3)
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    (tmp_path / "iter_0000003" / "manifest.json").write_bytes(b"{")
    assert restored(tmp_path, "checkpoint.rewind=true") == 2
    assert quarantined(tmp_path) == ["iter_0000001", "iter_0000003"]


def test_a_manifest_that_cannot_be_read_stops_a_run_that_would_begin_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 1)
    read = FileStorage.read

    def failing(self: FileStorage, path: str, limit: int) -> bytes:
        if path.endswith("manifest.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return read(self, path, limit)

    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "read", failing)
        with pytest.raises(CheckpointUnreadableError, match="Permission denied"):
            restored(tmp_path)
    assert restored(tmp_path) == 1 and quarantined(tmp_path) == []


def test_a_checkpoint_of_another_release_is_neither_used_nor_renamed(tmp_path: Path) -> None:
    run(tmp_path, 1, 2)
    edit_manifest(tmp_path / "iter_0000002", lambda manifest: manifest.__setitem__("version", 99))
    assert restored(tmp_path) == 1
    assert quarantined(tmp_path) == []
    with build_checkpointer("sync") as ours, pytest.raises(CheckpointLoadError, match="reads version 1"):
        ours.load(tmp_path / "iter_0000002")


def test_a_step_that_was_asked_for_and_cannot_be_used_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    """One that another release wrote may be whole."""
    run(tmp_path, 1, 2, 3)
    edit_manifest(tmp_path / "iter_0000003", lambda manifest: manifest.__setitem__("version", 99))
    (tmp_path / "iter_0000002" / "__0_0.distcp").unlink()
    for step, kind in ((3, CheckpointUnreadableError), (2, CheckpointCorruptError)):
        with pytest.raises(CheckpointCorruptError, match=f"resume={step}, and that checkpoint cannot") as caught:
            restored(tmp_path, f"checkpoint.resume={step}")
        assert type(caught.value) is kind


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for steps, text in (((), "there is none at all"), ((1,), "it has step 1"), ((2,), "it has steps 1, 2")):
        run(tmp_path, *steps)
        with pytest.raises(CheckpointNotFoundError) as caught:
            restored(tmp_path, "checkpoint.resume=7")
        assert str(caught.value) == f"checkpoint.resume=7, but {tmp_path} has no such checkpoint; {text}."
    assert steps_text(list(range(1, 9))) == "1, 2, 3, 4, 5, 6, 7, 8"
    assert steps_text(list(range(1, 11))) == "1, 2, 3, 4, 5, 6, 7, ... (10 in all), 10"


@pytest.mark.parametrize(
    "name", ["iter_000003", "iter_\u0660\u0660\u0660\u0660\u0660\u0660\u0663", "iter_0000003x", "0000003"]
)
def test_a_folder_with_nearly_the_name_of_a_step_is_none(tmp_path: Path, name: str) -> None:
    run(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "iter_0000002", tmp_path / name)
    assert restored(tmp_path) == 2
    with manager_in(tmp_path, "checkpoint.keep.last=1") as manager:
        assert manager.steps() == [1, 2]
        manager.save(4, {"weight": torch.full((1000,), 4.0), "step": 4})
    assert manager.steps() == [4] and (tmp_path / name / "manifest.json").exists()


def test_files_that_may_be_checkpoints_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, more in ((1, ""), (2, " and 1 more"), (3, " and 2 more")):
        torch.save(target(), tmp_path / f"weights-{number}.pt")
        caplog.clear()
        assert restored(tmp_path) is None
        assert caplog.text.count(f".pt{more} may be a checkpoint, but is not loaded; to load it, type ") == 1
    torch.save(target(), tmp_path / "step_4.pt")
    with pytest.raises(CheckpointNotFoundError, match=rf"To load it, type checkpoint\.resume={tmp_path}/step_4\.pt; "):
        restored(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_4").mkdir()
    names = FileStorage.names

    def failing(self: FileStorage, path: str) -> list[str]:
        if path.endswith("step_4"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return names(self, path)

    monkeypatch.setattr(FileStorage, "names", failing)
    assert restored(tmp_path) is None
    assert "step_4 ([Errno 5] Input/output error" in caplog.text and "whether it is a checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("path", "step"), [("step_7/weights.pt", 7), ("step_7/step_3.pt", 7), ("step_5.pt", 5), ("step_7/step_3", 3)]
)
def test_a_file_has_the_step_of_its_folder_or_else_its_own(path: str, step: int, tmp_path: Path) -> None:
    file = tmp_path / "theirs" / path
    file.parent.mkdir(parents=True)
    if file.suffix:
        torch.save({"weight": torch.ones(1000), "step": 1}, file)
    else:
        run(tmp_path / "theirs", 3)
        (tmp_path / "theirs" / "iter_0000003").rename(file)
    with manager_in(tmp_path / "ours", f"checkpoint.resume={file}") as manager:
        assert manager.restore(target()) == step


def test_another_models_checkpoint_is_an_error_and_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 1, 2)
    with manager_in(tmp_path) as manager, pytest.raises(CheckpointLoadError, match="has shape"):
        manager.restore({"weight": torch.zeros(7), "step": 0})
    assert quarantined(tmp_path) == [] and "was not used" not in caplog.text


@pytest.mark.parametrize("lost", [("manifest.json",), ("manifest.json", ".metadata", "integrity-0.json")])
def test_a_folder_without_a_manifest_is_quarantined(lost: tuple[str, ...], tmp_path: Path) -> None:
    """With another checkpoint to go on from, and without one: nobody ever committed it."""
    for root in (tmp_path / "with", tmp_path / "without"):
        run(root, 1, 2)
        for name in lost:
            (root / "iter_0000002" / name).unlink()
    shutil.rmtree(tmp_path / "without" / "iter_0000001")
    with manager_in(tmp_path / "with") as manager:
        assert manager.steps() == [1]  # a listing renames nothing
    assert quarantined(tmp_path / "with") == []
    assert restored(tmp_path / "with") == 1 and restored(tmp_path / "without") is None
    assert quarantined(tmp_path / "with") == quarantined(tmp_path / "without") == ["iter_0000002"]


def test_a_rename_that_fails_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 1, 2)
    flip_step(tmp_path, 2)

    with manager_in(tmp_path, "checkpoint.keep.last=2") as manager:
        with no_renames():
            assert manager.restore(target()) == 1
        assert "could not be quarantined" in caplog.text
        manager.save(3, target())
        tidied(manager)
        # The damaged one is neither counted nor deleted: a good one would go in its place.
        assert manager.steps() == [1, 2, 3]
        manager.save(4, target())
        tidied(manager)
        assert manager.steps() == [2, 3, 4]


def test_of_two_damaged_ones_the_second_is_quarantined_though_the_first_cannot_be(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3)
    for step in (2, 3):
        flip_step(tmp_path, step)
    with manager_in(tmp_path) as manager, no_renames(first=1):
        assert manager.restore(target()) == 1
    assert len(quarantined(tmp_path)) == 1


def test_steps_before_a_damaged_one_that_could_not_be_renamed_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The restore has told of it, and training does not stop at the first save."""
    run(tmp_path, 1, 5)
    flip_step(tmp_path, 5)

    with manager_in(tmp_path) as manager:
        with no_renames():
            assert manager.restore(target()) == 1
        assert "resumed from step 1 although 5 follow(s)" in caplog.text
        assert manager.save(2, target())


def test_a_restore_from_scratch_is_told_to_no_listener(tmp_path: Path) -> None:
    told = list[int | None]()

    class Listener(CheckpointListener):
        def on_restored(self, report: LoadReport) -> None:
            told.append(report.step)

    run(tmp_path, 1)
    with manager_in(tmp_path) as manager:
        manager.add_listener(Listener())
        assert manager.restore(target()) == 1
        shutil.rmtree(tmp_path / "iter_0000001")  # by hand
        assert manager.restore(target()) is None
    assert told == [1]


def test_a_damaged_one_that_could_not_be_renamed_counts_once_its_step_is_saved_anew(tmp_path: Path) -> None:
    run(tmp_path, 1, 2)
    flip_step(tmp_path, 2)

    with manager_in(tmp_path, "checkpoint.keep.last=2") as manager:
        with no_renames():
            assert manager.restore(target()) == 1
        shutil.rmtree(tmp_path / "iter_0000002")  # by hand
        for step in (2, 3, 4):
            manager.save(step, target())
            tidied(manager)
        assert manager.steps() == [3, 4]


@pytest.mark.parametrize("text", [b"", b"garbage", b"7", b"-1", b"\xff\xfe", b"9" * 100, b"1", None])
def test_the_scan_wins_over_the_pointer_which_is_repaired(text: bytes | None, tmp_path: Path) -> None:
    """Empty, garbage, ahead of the data, negative, no text, too long, behind, and not there."""
    run(tmp_path, 1, 2)
    if text is None:
        (tmp_path / POINTER).unlink()
    else:
        (tmp_path / POINTER).write_bytes(text)
    assert restored(tmp_path) == 2
    assert (tmp_path / POINTER).read_text() == "2"


@pytest.mark.parametrize(("text", "level"), [("1", "INFO"), ("7", "WARNING")])
def test_only_a_pointer_to_what_is_gone_is_worth_a_warning(
    text: str, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is behind is what a kill leaves."""
    run(tmp_path, 1, 2)
    (tmp_path / POINTER).write_text(text)
    with caplog.at_level("INFO", "ckpt_component"):
        assert restored(tmp_path) == 2
    assert [record.levelname for record in caplog.records if record.message.startswith("updated ")] == [level]


def test_a_pointer_that_leads_elsewhere_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    run(tmp_path / "root", 1, 2)
    precious = tmp_path / "precious"
    precious.write_text("1")
    (tmp_path / "root" / POINTER).unlink()
    (tmp_path / "root" / POINTER).symlink_to(precious)
    assert restored(tmp_path / "root") == 2
    assert precious.read_text() == "1" and not (tmp_path / "root" / POINTER).is_symlink()
    os.unlink(tmp_path / "root" / POINTER)
    os.mkfifo(tmp_path / "root" / POINTER)
    assert restored(tmp_path / "root") == 2
    assert (tmp_path / "root" / POINTER).read_text() == "2"


def test_a_pointer_that_cannot_be_set_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 1, 2)
    (tmp_path / POINTER).unlink()
    (tmp_path / POINTER).mkdir()
    assert restored(tmp_path) == 2
    assert "could not be updated" in caplog.text


def test_a_pointer_beside_no_checkpoint_of_ours_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / POINTER).write_text("500")
    assert restored(tmp_path) is None
    assert (tmp_path / POINTER).read_text() == "500"


def test_only_dead_debris_of_this_host_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "root"
    run(root, 1, 2)
    shutil.copytree(root / "iter_0000002", root / "iter_0000009")  # a copy is a checkpoint
    (root / "iter_0000009" / "__0_0.distcp").touch()
    dead, alive = (
        new_attempt(FileStorage(), str(root / name), new_token()) for name in ("iter_0000003", "iter_0000004")
    )
    for attempt in (dead, alive):
        begin(attempt)
    held = AttemptLock(FileStorage(), alive)
    half_deleted = root / os.path.basename(dead.staging).replace(".ckpt-tmp.", ".ckpt-trash.").replace("03.", "05.")
    half_deleted.mkdir()
    (half_deleted / "__0_0.distcp").write_bytes(b"x")
    for path in (dead.staging, alive.staging, half_deleted):
        os.utime(path, (1, 1))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.full((1000,), 6.0), "step": 6}, checkpoint_id=root / "iter_0000006")
    foreign = [
        ".ckpt-tmp.iter_0000007.0badc0de-12345678",  # another host's
        ".ckpt-quarantine.iter_0000008.0badc0de-12345678",
        "iter_0000006",  # of stock DCP
        "iter_0000010/mp_rank_00",  # of Megatron before DCP
        "iter_0000011",  # empty
        "iter_00000012",  # not a name that we give
        "iter_0000013.orbax-checkpoint-tmp-1",
        "notes",
        "tmp",
    ]
    for name in foreign:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "iter_0000014").symlink_to(outside)
    (root / "iter_0000015").write_text("a file")
    links = root / f".ckpt-tmp.iter_0000016.{dead.token}"
    links.symlink_to(outside)
    before = {path.name for path in root.iterdir()}
    try:
        assert restored_nine(root)
    finally:
        held.close()
    after = {path.name for path in root.iterdir()}
    assert before - after == {os.path.basename(dead.staging), half_deleted.name} and after <= before
    assert (outside / "precious").read_text() == "x"
    assert (root / POINTER).read_text() == "9"
    with build_checkpointer("sync") as ours:
        caplog.clear()
        assert ours.load(root / "iter_0000006")["step"] == 6  # loads, and is said to be unverified
        assert "cannot be verified" in caplog.text


def restored_nine(root: Path) -> bool:
    state = target()
    with manager_in(root, "checkpoint.timeouts.close=0.2", "checkpoint.keep.last=1") as manager:
        assert manager.restore(state) == 9
        assert manager.steps() == [1, 2, 9]
    return state["step"] == 2 and bool(state["weight"].eq(2).all())


def test_keep_never_follows_a_link(tmp_path: Path) -> None:
    """A step that is a link to somebody's folder is nothing that we may delete."""
    run(tmp_path / "theirs", 1)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "iter_0000001").symlink_to(tmp_path / "theirs" / "iter_0000001")
    with manager_in(tmp_path / "ours", "checkpoint.keep.last=1") as manager:
        for step in (2, 3):
            manager.save(step, {"weight": torch.full((1000,), float(step)), "step": step})
    assert manager.steps() == [3]
    assert restored(tmp_path / "theirs") == 1


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_a_restore_reads_each_manifest_once(commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, root, log = (f"checkpoint.commit={commit}", "checkpoint.keep.last=null"), tmp_path / "run", tmp_path / "ops"
    with manager_in(root, *usual) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((1000,), float(step)), "step": step})
    monkeypatch.setenv(FAILPOINT_LOG, str(log))
    monkeypatch.setenv(FAILPOINT, "read:path=manifest.json:action=sleep:0")
    assert restored(root, *usual) == 3
    read = Counter(entry.path for entry in read_log(f"{log}.fired"))
    assert read == {str(root / f"iter_{step:07d}" / "manifest.json"): 1 for step in (1, 2, 3)}


def test_the_log_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 1)
    (tmp_path / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "ckpt_component"):
        assert restored(tmp_path) == 1
    assert len([record for record in caplog.records if "iter_0000002" in record.message]) == 1


def test_a_writer_at_work_is_waited_for_until_it_ends_or_the_time_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = new_attempt(FileStorage(), str(tmp_path / "iter_0000001"), new_token())
    begin(attempt)
    held, files = AttemptLock(FileStorage(), attempt), FileStorage()
    now, looks, ends = 100.0, 0, 1000.0

    def look() -> float:
        nonlocal looks
        looks += 1
        return now if looks < 1000 else 1e9

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > ends:
            held.close()

    files.outside = Outside()
    files.outside.now, files.outside.sleep = look, sleep
    caplog.set_level(logging.INFO, "ckpt_component")
    assert wait_for_writers(files, str(tmp_path), MEGATRON, 9.0).living() and 109 < now < 110
    shown = f"waiting for another process that is finishing {os.path.basename(attempt.staging)}, for at most 4 s more"
    assert caplog.text.count(shown) == caplog.text.count("continuing without it") == 1
    caplog.clear()
    now, looks, ends = 100.0, 0, 107.0
    assert not wait_for_writers(files, str(tmp_path), MEGATRON, 9.0).living() and 107 < now < 108
    assert caplog.text.count(shown) == 1 and "continuing without it" not in caplog.text


def test_a_file_that_may_be_missing_but_cannot_be_looked_for_is_unreadable_and_damages_nothing(tmp_path: Path) -> None:
    class Away(FileStorage):
        """A mount that does not answer any more once a file is missing."""

        def exists(self, path: str) -> bool:
            if path.endswith(".distcp"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().exists(path)

    run(tmp_path, 1, 2)
    path = tmp_path / "iter_0000002"
    next(path.glob("*.distcp")).unlink()
    with (
        build_checkpointer("sync", storage_of=lambda _: Away()) as checkpointer,
        pytest.raises(CheckpointUnreadableError, match="Input/output error"),
    ):
        checkpointer.load(path)


# --- several ranks --------------------------------------------------------------------------------------------------


class _View(FileStorage):
    """What one rank sees: a checkpoint at the second look, and its files unless their opening fails."""

    def __init__(self, failure: Exception | None, is_late: bool) -> None:
        super().__init__()
        self._failure = failure
        self._looks = -1 if is_late else 0

    def exists(self, path: str) -> bool:
        self._looks += 1
        return self._looks >= 1 and super().exists(path)

    def is_folder(self, path: str) -> bool:
        return self._looks >= 0 and super().is_folder(path)

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        if self._failure is not None:
            raise self._failure
        return super().open_files(folder, shared=shared)


@pytest.mark.parametrize(
    ("failures", "restored", "told"),
    [
        ([None, None], 2, []),
        ([None, CheckpointUnreadableError("b")], 1, []),
        ([None, CheckpointCorruptError("b")], 1, []),
        ([CheckpointLoadError("a"), None], None, ["a", "Rank 0: a"]),
    ],
)
def test_all_ranks_load_what_they_see_and_fall_back_where_one_cannot_read(
    failures: list[Exception | None], restored: int | None, told: list[str], tmp_path: Path
) -> None:
    """What one rank cannot read of step 2 is damaged for none, since the leading rank looks once more."""
    run(tmp_path, 1, 2)
    files, views = FileStorage(), [_View(failure, is_late=rank == 1) for rank, failure in enumerate(failures)]
    timeouts, building = ResolvedTimeouts(stage=60.0, write=1.0), threading.Lock()

    def storage_of(rank: int, path: str) -> FileStorage:
        return views[rank] if path.endswith("iter_0000002") else files

    def load(ranks: StoreCoordinator) -> int | None:
        with building:
            view = partial(storage_of, ranks.rank)
            checkpointer = build_checkpointer("sync", ranks=ranks, storage_of=view)
        context = RunContext(files, str(tmp_path), MEGATRON, ranks, timeouts)
        folder = RunFolder(context, ResumePolicy(), RetentionPolicy(), takeover=False)
        return Restorer(checkpointer, folder, saves=False).load(target(), strict=True, allow_dtype_cast=False)

    with rank_threads(2) as on_all:
        found = on_all(load)
    if restored is not None:
        assert found == [restored] * 2
    else:
        assert [(type(each), str(each)) for each in found] == [(CheckpointLoadError, text) for text in told]


@pytest.mark.slow
def test_two_ranks_go_on_together(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "damaged_for_one", 2, tmp_path)
    assert quarantined(tmp_path) == ["iter_0000003"]
    assert (tmp_path / POINTER).read_text() == "4"


def test_discard_takes_a_link_away_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text("x")
    (tmp_path / "iter_0000001").symlink_to(tmp_path / "theirs")
    discard(FileStorage(), str(tmp_path / "iter_0000001"))
    assert (tmp_path / "theirs" / "precious").read_text() == "x"


# --- saves of the same manager --------------------------------------------------------------------------------------


class _Gate(logging.Handler):
    """Holds commits until a restore says that it waits for them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.opened = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for the save of step 2 of this run" in record.getMessage():
            self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gate]:
    gate, rename_new, logger = _Gate(), FileStorage.rename_new, logging.getLogger("ckpt_component")

    def rename_later(self: FileStorage, source: str, target: str) -> None:
        if target.endswith("iter_0000002"):
            assert gate.opened.wait(60)
        rename_new(self, source, target)

    monkeypatch.setattr(FileStorage, "rename_new", rename_later)
    logger.addHandler(gate)
    logger.setLevel(logging.INFO)
    yield gate
    gate.opened.set()
    logger.removeHandler(gate)
    logger.setLevel(logging.NOTSET)


def test_restore_waits_for_the_save_of_its_own_manager(tmp_path: Path, gate: _Gate) -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "step": 0}
    with build_manager("async_persistent", dir=tmp_path) as manager:
        for step in (1, 2):
            state["step"] = step
            manager.save(step, state)
        state["step"] = 0
        try:
            assert manager.restore(state) == 2 and state["step"] == 2
        finally:
            gate.opened.set()
        assert manager.save(2, state) is False  # the loop continues there
        assert manager.save(3, state)
    assert manager.steps() == [1, 2, 3]


def test_begin_at_waits_for_the_save_of_its_own_manager(tmp_path: Path, gate: _Gate) -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "step": 0}
    with build_manager("async_persistent", dir=tmp_path) as manager:
        try:
            for step in (1, 2):
                manager.save(step, state)
            manager.begin_at(2)
            assert gate.opened.is_set() and manager.reports[-1].step == 2
        finally:
            gate.opened.set()
        assert manager.save(2, state) is False  # it is there
    assert manager.steps() == [1, 2]


def test_restore_after_a_failed_save_of_its_own_takes_the_one_before(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "step": 1}
    with build_manager("async_persistent", ["checkpoint.on_error=warn"], dir=tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, {"w": torch.ones(3).to_sparse()})
        state["step"] = 0
        assert manager.restore(state) == 1 and state["step"] == 1
        assert manager.save(2, state)
    assert manager.steps() == [1, 2]
