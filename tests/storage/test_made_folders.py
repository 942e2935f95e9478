"""Folders that a killed process has made are made durable by the next one, and what is set aside stays so."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import quarantine
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedFiles

FOLDER, FILE = "/a/b/c", "/a/b/c/file"
FAULTS = {"killed": Fault("cut"), "refused": Fault("fail", errno.ENOSPC), "answer_lost": Fault("lost")}


def stays_after_power_cuts(disk: Disk, files: FileStorage) -> None:
    """A file in the folder, which `files` makes now, survives power cuts."""
    files.make_folders(FOLDER)
    files.write_new(FILE, b"data")
    files.sync_folder(FOLDER)
    for seed in range(4):
        disk.cut_power(seed)
        assert bytes(disk.file(FILE).data) == b"data"


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("number", range(1, 8))
def test_a_folder_that_a_predecessor_did_not_make_durable_is(number: int, kind: str) -> None:
    disk = Disk()
    with pytest.raises((PowerCut, OSError)):
        SimulatedFiles(disk, {number: FAULTS[kind]}).make_folders(FOLDER)
    stays_after_power_cuts(disk, SimulatedFiles(disk))


def test_a_folder_that_another_process_makes_at_the_same_time_is() -> None:
    class AfterAnother(SimulatedFiles):
        """Another process makes each folder just before, and is killed then."""

        def make_folder(self, path: str) -> None:
            super().make_folder(path)
            super().make_folder(path)

    disk = Disk()
    stays_after_power_cuts(disk, AfterAnother(disk))


@pytest.mark.parametrize("renames", [True, False])
def test_a_checkpoint_in_a_folder_that_a_killed_process_has_made_stays(renames: bool) -> None:
    disk = Disk()
    files = SimulatedFiles(disk, atomic_rename=renames)
    files.make_folder("/runs")
    attempt = commit.new_attempt(files, "/runs/one", new_token())
    commit.begin(attempt)
    commit.publish(attempt, [], {}, {})
    for seed in range(4):
        after = copy.deepcopy(disk)
        after.cut_power(seed)
        assert after.find("/runs/one/manifest.json") is not None


def test_a_checkpoint_that_was_set_aside_has_its_name_no_more_after_a_power_cut() -> None:
    disk = Disk()
    files = SimulatedFiles(disk)
    files.make_folder("/runs")
    attempt = commit.new_attempt(files, "/runs/one", new_token())
    commit.begin(attempt)
    commit.publish(attempt, [], {}, {})
    kept = quarantine(files, "/runs/one")
    for seed in range(4):
        after = copy.deepcopy(disk)
        after.cut_power(seed)
        assert after.find("/runs/one") is None and after.find(f"{kept}/manifest.json") is not None


def test_folders_below_one_that_may_not_be_listed_are_made_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlisted(FileStorage):
        def sync_folder(self, path: str) -> None:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "may not be listed", path)
            super().sync_folder(path)

    (tmp_path / "mine").mkdir()
    Unlisted().make_folders(str(tmp_path / "mine"))
    Unlisted().make_folders(str(tmp_path / "mine" / "run"))
    assert os.listdir(tmp_path / "mine") == ["run"]
    monkeypatch.chdir(tmp_path)
    FileStorage().make_folders("mine")
    FileStorage().make_folders("mine/two")
    assert sorted(os.listdir("mine")) == ["run", "two"]
