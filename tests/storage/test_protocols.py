"""The commit protocols by themselves: every fault at every operation of a commit, a deletion and a quarantine."""

from __future__ import annotations

import copy
import errno
import logging
import os
import time
from dataclasses import replace

import pytest
from commit_trials import FAULTS, FILES, ROOT, SEEDS, TARGET, Trial, delete, lives, save, seen, set_aside

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished, discard, quarantine, sweep_attempts
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import VERSION, encode_manifest, read_manifest
from ckpt_component.core.commit.names import (
    ALIVE_PREFIX,
    MANIFEST,
    MEGATRON,
    QUARANTINE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    trash_path,
)
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.protocols import attempts_in, is_quarantined
from ckpt_component.core.processes.running import ProcessName
from ckpt_component.core.storage.new_names import host_token, new_token
from ckpt_component.errors import CheckpointConfigError, CheckpointExistsError, CheckpointSaveError
from ckpt_component.testing import Disk, SimulatedFiles

FOREIGN = "0badc0de-12345678"
ANOTHER = {"version": VERSION, "attempt": FOREIGN, "world_size": 1, "files": []}


@pytest.mark.parametrize(("atomic_rename", "goes"), [(False, True), (True, False)])
def test_an_empty_folder_of_a_step_is_an_attempts_where_attempts_make_it(atomic_rename: bool, goes: bool) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=atomic_rename, locks=atomic_rename)
    files.make_folders(TARGET)
    files.disk.now += 600
    Unfinished(files, ROOT, MEGATRON).sweep()
    assert files.exists(TARGET) != goes


def test_an_empty_folder_that_an_attempt_may_be_about_to_use_stays() -> None:
    files = SimulatedFiles(Disk(), atomic_rename=False, locks=False)
    files.make_folders(os.path.join(ROOT, "events"))
    files.make_folder(os.path.join(ROOT, "iter_0000001"))
    files.disk.now += 600
    files.make_folder(os.path.join(ROOT, "iter_0000002"))
    Unfinished(files, ROOT, MEGATRON).sweep()
    assert files.names(ROOT) == ["events", "iter_0000002"]


def test_a_sweep_that_finds_nothing_changes_nothing() -> None:
    files = SimulatedFiles(Disk(), atomic_rename=False)
    files.make_folders(ROOT)
    save(Trial(files))
    files.operations.clear()
    assert Unfinished(files, ROOT, MEGATRON).sweep() == [] and files.operations == []


def begun(files: SimulatedFiles, step: int, token: str) -> Attempt:
    attempt = commit.new_attempt(files, os.path.join(ROOT, MEGATRON.folder(step)), token)
    commit.begin(attempt)
    return attempt


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_is_waited_for_are_attempts_that_live_on_this_host(protocol: str) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename")
    files.make_folders(trash_path(TARGET))
    foreign, alive, _ = (begun(files, step, token) for step, token in enumerate([FOREIGN, new_token(), new_token()]))
    locks = [AttemptLock(files, foreign), AttemptLock(files, alive)]
    assert Unfinished(files, ROOT, MEGATRON).living() == [os.path.relpath(alive.staging, ROOT)]
    for lock in locks:
        lock.close()
    assert Unfinished(files, ROOT, MEGATRON).living() == []


def test_a_mark_of_a_process_that_has_ended_goes_with_its_attempt_and_not_before() -> None:
    """Without the mark, the next start could not tell that the attempt is dead."""
    files = SimulatedFiles(Disk(), locks=False)
    files.make_folders(ROOT)
    first, last = (f"{host_token()}-{digit * 8}" for digit in "0f")
    ended = replace(ProcessName.current(), pid=2**22 + 1).key  # above the highest that Linux gives
    kept, stray = (f"{ALIVE_PREFIX}{token}.{ended}.{new_token()}" for token in (first, last))
    for mark in (kept, stray):
        files.write_new(os.path.join(ROOT, mark), b"")
    staging = os.path.basename(begun(files, 1, first).staging)
    assert Unfinished(files, ROOT, MEGATRON).sweep() == [stray]
    assert files.names(ROOT) == [kept, staging]
    files.disk.now += 6
    assert Unfinished(files, ROOT, MEGATRON).sweep() == [staging, kept]


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_dead_processes_left_of_one_target_is_deleted_alone(protocol: str) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename")
    files.make_folders(ROOT)
    attempts = [begun(files, step, new_token()) for step in (1, 2, 3)]
    files.disk.now += 600
    sweep_attempts(files, attempts[1].target)
    assert [files.exists(attempt.staging) for attempt in attempts] == [True, protocol == "manifest", True]


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_a_dead_attempt_left_is_deleted_in_one_step(protocol: str) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
    files.make_folders(ROOT)
    attempt = commit.new_attempt(files, TARGET, new_token())
    commit.begin(attempt)
    files.write_new(os.path.join(attempt.staging, "data"), b"1")
    files.disk.now += 600
    files.operations.clear()
    Unfinished(files, ROOT, MEGATRON).sweep()
    assert files.names(ROOT) == []
    first = next(name for name, path in files.operations if attempt.token in path or TRASH_PREFIX in path)
    assert first == ("rename_new" if protocol == "rename" else "unlink")


@pytest.mark.parametrize("seed", range(8))
def test_a_manifest_whose_deletion_was_not_synced_does_not_come_back_without_its_data(seed: int) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=False, locks=False)
    files.make_folders(ROOT)
    save(Trial(files))
    files.unlink(os.path.join(TARGET, MANIFEST))
    files.disk.now += 600
    Unfinished(files, ROOT, MEGATRON).sweep()
    files.turn_off()
    files.disk.cut_power(seed)
    after = SimulatedFiles(files.disk, atomic_rename=False, locks=False)
    assert not after.exists(os.path.join(TARGET, MANIFEST))


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_is_in_the_way_of_a_save(protocol: str) -> None:
    for entry, is_refused in (("", False), ("a_file", True), ("manifest.json", True)):
        files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
        files.make_folders(TARGET)
        if entry:
            files.write_new(os.path.join(TARGET, entry), b"mine")
        trial = Trial(files)
        save(trial)
        assert isinstance(trial.error, CheckpointExistsError) == is_refused, entry
        assert "already exists" in str(trial.error) or not is_refused
        if is_refused:
            assert files.read(os.path.join(TARGET, entry), 9) == b"mine", entry
            continue
        assert seen(files), entry
        names = [*FILES, ".metadata", "manifest.json"]
        found = [
            *files.names(TARGET),
            *(name for each in attempts_in(files, TARGET) for name in files.names(f"{TARGET}/{each}")),
        ]
        assert sorted(found) == sorted([*names, *attempts_in(files, TARGET)]), entry
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
    files.make_folders(ROOT)
    files.write_new(TARGET, b"mine")
    trial = Trial(files)
    save(trial)
    assert isinstance(trial.error, CheckpointExistsError)
    assert files.read(TARGET, 9) == b"mine"


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_parents_are_made_but_not_the_folder_of_a_run_that_vanished(protocol: str) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
    commit.begin(commit.new_attempt(files, "/new/folder/one", new_token()))
    assert files.is_folder("/new/folder")
    attempt = commit.new_attempt(files, "/gone/one", new_token(), owner="a run")
    with pytest.raises(FileNotFoundError):
        commit.begin(attempt)
    assert not files.exists("/gone")


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_a_power_cut_leaves_the_folder_of_an_attempt(protocol: str) -> None:
    """So that no manifest may be left without it."""
    for seed in SEEDS:
        files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
        files.make_folders(ROOT)
        attempt = begun(files, 1, new_token())
        files.disk.cut_power(seed)
        assert files.is_folder(attempt.staging), seed


def test_a_target_that_another_attempt_made_and_did_not_sync_is_durable_too() -> None:
    for seed in SEEDS:
        files = SimulatedFiles(Disk(), atomic_rename=False, locks=False)
        files.make_folders(ROOT)
        files.make_folder(TARGET)
        trial = Trial(files)
        save(trial)
        assert trial.acknowledged
        files.disk.cut_power(seed)
        assert seen(SimulatedFiles(files.disk, atomic_rename=False, locks=False)), seed


def test_a_single_file_needs_renames_and_a_store_must_keep_conditions() -> None:
    class IgnoresConditions(SimulatedFiles):
        def check_puts(self, folder: str, name: str) -> None:
            raise OSError(errno.EIO, "ignores If-None-Match", folder)

    files = SimulatedFiles(Disk(), atomic_rename=False, locks=False)
    with pytest.raises(CheckpointConfigError, match="single file, which needs a rename"):
        commit.begin(commit.new_attempt(files, TARGET, new_token(), file="one.pt"))
    files = IgnoresConditions(Disk(), atomic_rename=False, locks=False)
    with pytest.raises(OSError, match="ignores If-None-Match"):
        commit.begin(commit.new_attempt(files, TARGET, new_token()))


class LosesAnswers(SimulatedFiles):
    """The put of the manifest is done and its answer lost; then so many reads of it fail."""

    unreadable = 0

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        super().put_new(path, data, draft)
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def read(self, path: str, limit: int) -> bytes:
        if path.endswith("manifest.json") and self.unreadable > 0:
            self.unreadable -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read(path, limit)


def put(files: SimulatedFiles, seconds: float = 0.0) -> None:
    attempt = commit.new_attempt(files, TARGET, new_token())
    commit.begin(attempt)
    commit.publish(attempt, [{"rank": 0, "files": []}], {}, {}, seconds)


def test_a_lost_answer_is_looked_for_as_long_as_files_may_take_to_be_visible() -> None:
    files = LosesAnswers(Disk(), atomic_rename=False, locks=False)
    files.unreadable = 2
    begun = time.monotonic()
    put(files, 20)
    assert read_manifest(files, TARGET)
    assert time.monotonic() - begun < 10
    files = LosesAnswers(Disk(), atomic_rename=False, locks=False)
    files.unreadable = 1000
    with pytest.raises(CheckpointSaveError, match="Could not find out whether"):
        put(files, 0.1)


@pytest.mark.parametrize("then", ["is_read", "cannot_be_read", "is_of_another"])
def test_a_lost_answer_of_a_rename_is_looked_into(then: str) -> None:
    class Renamed(SimulatedFiles):
        is_readable = True

        def rename_new(self, source: str, target: str) -> bool:
            super().rename_new(source, target)
            if then == "is_of_another":
                self.unlink(os.path.join(target, "manifest.json"))
                self.write_new(os.path.join(target, "manifest.json"), encode_manifest(ANOTHER))
            self.is_readable = then != "cannot_be_read"
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)

        def read(self, path: str, limit: int) -> bytes:
            if not self.is_readable:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().read(path, limit)

    files = Renamed(Disk())
    if then == "is_read":
        put(files)
        assert read_manifest(files, TARGET)
    elif then == "cannot_be_read":
        with pytest.raises(CheckpointSaveError, match="Could not find out whether"):
            put(files)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            put(files)
        assert read_manifest(files, TARGET) == ANOTHER


def test_what_is_damaged_and_of_another_attempt_is_not_taken_back() -> None:
    files = SimulatedFiles(Disk(), atomic_rename=False, locks=False)
    attempt = commit.new_attempt(files, TARGET, new_token())
    commit.begin(attempt)
    files.write_new(os.path.join(TARGET, "manifest.json"), b"damaged")
    with pytest.raises(CheckpointSaveError, match="Could not find out whether"):
        commit.publish(attempt, [{"rank": 0, "files": []}], {}, {})
    assert files.read(os.path.join(TARGET, "manifest.json"), 99) == b"damaged"


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_was_taken_back_stays_away_after_a_power_cut(protocol: str) -> None:
    for at, trial, files in lives(save, protocol, None, "fails"):
        for seed in SEEDS if not trial.acknowledged else ():
            disk = copy.deepcopy(files.disk)
            disk.cut_power(seed)
            rename = protocol == "rename"
            assert not seen(SimulatedFiles(disk, atomic_rename=rename, locks=rename)), f"{at}, cut {seed}"


def test_a_single_file_replaces_the_one_before_and_no_folder() -> None:
    files = SimulatedFiles(Disk())
    files.make_folders(ROOT)
    for data in (b"1", b"22"):
        attempt = commit.new_attempt(files, TARGET, new_token(), file="one.pt")
        commit.begin(attempt)
        files.write_new(os.path.join(attempt.staging, "one.pt"), data)
        assert not commit.is_over(attempt)
        entry = {"name": "one.pt", "size": len(data)}
        assert commit.publish(attempt, [{"rank": 0, "files": [entry]}], {}, {}) == 1
        assert commit.is_over(attempt)
        assert files.names(ROOT) == [os.path.basename(TARGET)]
        for seed in SEEDS:
            disk = copy.deepcopy(files.disk)
            disk.cut_power(seed)
            assert SimulatedFiles(disk).read(TARGET, 9) == data
    files.unlink(TARGET)
    files.make_folders(TARGET)
    with pytest.raises(CheckpointExistsError, match="is a folder, and a file is to be saved there"):
        commit.begin(commit.new_attempt(files, TARGET, new_token(), file="one.pt"))


@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_another_attempt_and_one_in_another_process_are_of_the_same_checkpoint(protocol: str) -> None:
    files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
    first, token = commit.new_attempt(files, TARGET, new_token(), "a run"), new_token()
    assert first.again(token) == commit.new_attempt(files, TARGET, token, "a run")
    assert first.again(token) != first
    plain = first.to_plain()
    assert plain == {"target": TARGET, "token": first.token, "staging": first.staging, "owner": "a run", "file": ""}
    assert Attempt(first.protocol, **plain) == first


def test_two_attempts_at_one_name_end_with_one_checkpoint() -> None:
    for protocol in ("rename", "manifest"):
        files = SimulatedFiles(Disk(), atomic_rename=protocol == "rename", locks=False)
        files.make_folders(ROOT)
        one, other = (commit.new_attempt(files, TARGET, new_token()) for _ in range(2))
        for attempt in (one, other):
            commit.begin(attempt)
        commit.publish(one, [{"rank": 0, "files": []}], {}, {})
        with pytest.raises(CheckpointExistsError, match="was taken by another save"):
            commit.publish(other, [{"rank": 0, "files": []}], {}, {})
        commit.abandon(other)
        assert (read_manifest(files, TARGET) or {})["attempt"] == one.token
        assert not files.exists(other.staging)
        assert commit.is_over(one)
        assert commit.is_over(other)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_a_save_is_there_whole_or_not_at_all(protocol: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = set()
    for at, trial, files in lives(save, protocol, None, fault):
        there = seen(files)
        outcomes.add((trial.acknowledged, there))
        assert not isinstance(trial.error, CheckpointExistsError), f"{at}: nothing was in the way"
        assert there or not trial.acknowledged, f"{at}: acknowledged, and not there"
        if fault not in ("cut", "fails_from_then_on"):
            assert there == trial.acknowledged, f"{at}: reported as failed, and there"
            names = [name for name in files.names(ROOT) if name.startswith((STAGING_PREFIX, TRASH_PREFIX))]
            left = [name for name in attempts_in(files, TARGET) if not there or name not in trial.tokens]
            clean = (
                trial.acknowledged
                or fault == "answer_lost"
                or not [*names, *left, *([] if there else [TARGET] * files.exists(TARGET))]
            )
            assert clean or "stays until the next start" in caplog.text or "could not be" in caplog.text, (
                f"{at}: {names} {left}"
            )
        caplog.clear()
        with caplog.at_level(logging.CRITICAL):
            again = Trial(files)  # a second attempt, under the same name or refused
            save(again)
        assert seen(files) and again.acknowledged == (not there), f"{at}: {again.error}"
    assert (True, True) in outcomes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_is_deleted_is_there_whole_or_not_at_all(protocol: str, fault: str) -> None:
    for at, trial, files in lives(delete, protocol, save, fault):
        there = seen(files)
        assert not (there and trial.acknowledged), f"{at}: reported as deleted"
        assert fault == "cut" or not (trial.acknowledged and files.exists(TARGET)), at
        assert discard(files, TARGET) or not there, at
        assert not seen(files), at
        if there:
            assert not files.exists(TARGET), at


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("protocol", ["rename", "manifest"])
def test_what_is_set_aside_keeps_its_data_and_frees_the_name(protocol: str, fault: str) -> None:
    for at, trial, files in lives(set_aside, protocol, save, fault):
        if seen(files):
            assert not trial.acknowledged, at
            quarantine(files, TARGET)
        assert not seen(files), at
        renamed = [os.path.join(ROOT, name) for name in files.names(ROOT) if name.startswith(QUARANTINE_PREFIX)]
        marked = [os.path.join(TARGET, name) for name in attempts_in(files, TARGET)]
        (folder,) = renamed or marked
        assert renamed or is_quarantined(files, folder), at
        assert files.read(os.path.join(folder, "data"), 100) == FILES["data"], at
        again = Trial(files)
        save(again)
        assert again.acknowledged, f"{at}: {again.error}"
