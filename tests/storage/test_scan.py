"""What a scan says of the folders of a run, on a simulated disk."""

from __future__ import annotations

import os

import pytest

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import quarantine
from ckpt_component.core.commit.names import MEGATRON, STEP, StepNames
from ckpt_component.core.commit.scan import committed_under_other_names, foreign_checkpoints, scan_steps
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.testing import Disk, SimulatedBucket, SimulatedFiles, SimulatedObjects

ROOT = "/runs/one"


class Reversed(SimulatedFiles):
    """Lists the last name first: the order is the file system's."""

    def names(self, path: str) -> list[str]:
        return sorted(super().names(path), reverse=True)


@pytest.fixture
def files() -> SimulatedFiles:
    files = Reversed(Disk())
    files.make_folders(ROOT)
    return files


def saved(files: Storage, step: int, names: StepNames = MEGATRON) -> str:
    attempt = commit.new_attempt(files, os.path.join(ROOT, names.folder(step)), new_token())
    commit.begin(attempt)
    files.write_new(os.path.join(attempt.staging, "data"), b"1234")
    commit.publish(attempt, [{"rank": 0, "files": [{"name": "data", "size": 4}]}], {}, {})
    return attempt.target


def test_committed_steps_are_in_order_whatever_the_listing_is_in(files: SimulatedFiles) -> None:
    for step in (2, 1, 3):
        saved(files, step)
    assert scan_steps(files, ROOT, MEGATRON).committed == [1, 2, 3]


@pytest.mark.parametrize("lag", range(1, 12))
def test_a_listing_that_lags_makes_no_checkpoint_damaged(lag: int) -> None:
    bucket = SimulatedBucket(SimulatedObjects())
    for name in ("one", "two"):
        bucket.write_new(f"{ROOT}/{name}", b"")
    saved(bucket, 1)
    bucket.disk.lag = lag
    scan = scan_steps(bucket, ROOT, MEGATRON)
    assert not scan.damaged and scan.committed == ([1] if any(bucket.names(f"{ROOT}/iter_0000001")) else [])


def test_what_is_no_folder_is_foreign_and_what_is_gone_is_nothing(files: SimulatedFiles) -> None:
    files.write_new(os.path.join(ROOT, "iter_0000001"), b"")
    assert scan_steps(files, ROOT, MEGATRON).foreign.keys() == {1}

    class Gone(SimulatedFiles):
        def names(self, path: str) -> list[str]:
            return [*super().names(path), "iter_0000002"]

    gone = Gone(Disk())
    gone.make_folders(ROOT)
    scan = scan_steps(gone, ROOT, MEGATRON)
    assert not scan.steps() and not scan.occupied


def test_quarantined_data_in_the_folder_of_a_step_is_no_unfinished_save() -> None:
    files = SimulatedFiles(Disk(), atomic_rename=False)
    files.make_folders(ROOT)
    quarantine(files, saved(files, 1))
    assert not scan_steps(files, ROOT, MEGATRON).steps()
    commit.begin(commit.new_attempt(files, os.path.join(ROOT, "iter_0000001"), new_token()))
    assert scan_steps(files, ROOT, MEGATRON).unfinished.keys() == {1}


def test_checkpoints_under_another_naming_are_found_also_alone(files: SimulatedFiles) -> None:
    assert committed_under_other_names(files, ROOT, MEGATRON) is None
    saved(files, 1, STEP)
    assert committed_under_other_names(files, ROOT, MEGATRON) == ("step", [1])
    assert committed_under_other_names(files, ROOT, STEP) is None


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_a_root_that_is_a_checkpoint_itself_is_foreign(name: str, files: SimulatedFiles) -> None:
    files.write_new(os.path.join(ROOT, name), b"")
    assert foreign_checkpoints(files, ROOT, scan_steps(files, ROOT, MEGATRON), MEGATRON) == [ROOT]
