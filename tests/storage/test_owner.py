"""Who may commit under a root."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckpt_component import CheckpointExistsError, CheckpointFencedError, build_checkpointer, build_manager
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.fencing import FencingToken, is_copy, read_owner
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import Storages
from ckpt_component.core.storage.new_names import NEW_PREFIX, new_path, new_token
from ckpt_component.core.storage.storage import Storage


def test_the_last_run_to_save_owns_the_root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = FencingToken(FileStorage(), str(tmp_path)), FencingToken(FileStorage(), str(tmp_path))
    first.acquire()
    first.acquire()
    second.acquire()
    owner = read_owner(FileStorage(), str(tmp_path))
    assert owner is not None and (owner.generation, owner.token, owner.pid) == (2, second.token, os.getpid())
    assert "from an earlier manager of this process" in caplog.text
    with pytest.raises(CheckpointFencedError, match=f"Another manager of this process took over {tmp_path}"):
        first.acquire()


def test_the_owner_file_names_the_last_runs_before(tmp_path: Path) -> None:
    tokens = [new_token() for _ in range(20)]
    for token in tokens:
        FencingToken(FileStorage(), str(tmp_path), token=token).acquire()
    owner = read_owner(FileStorage(), str(tmp_path))
    assert owner is not None and owner.token == tokens[-1] and owner.earlier == (*tokens[-2:2:-1],)


def test_a_folder_is_that_of_a_run_or_a_copy_of_it(tmp_path: Path) -> None:
    """The owner file is copied with the rest: so it counts where the run's own folder no longer is another one."""
    run, copy, link = (str(tmp_path / name) for name in ("run", "copy", "link"))
    older, newer = (FencingToken(FileStorage(), run) for _ in range(2))
    older.acquire()
    newer.acquire()
    os.symlink(run, link)
    shutil.copytree(run, copy)
    storage_of = Storages().of
    for token in (older.token, newer.token):
        assert not is_copy(run, run, token, storage_of) and not is_copy(link, run, token, storage_of)
        assert is_copy(copy, run, token, storage_of) and is_copy(copy, link, token, storage_of)
    assert not is_copy(copy, run, new_token(), storage_of)  # of which the folder says nothing
    os.rename(run, tmp_path / "elsewhere")
    os.mkdir(run)
    assert not is_copy(copy, run, newer.token, storage_of)  # there is another folder now, with no owner
    FencingToken(FileStorage(), run).acquire()
    assert not is_copy(copy, run, newer.token, storage_of)


def test_a_bucket_is_that_of_a_run_by_its_url(tmp_path: Path) -> None:
    def nothing_is_read(path: str) -> Storage:
        raise AssertionError(path)

    assert not is_copy("s3://bucket/run", "S3://bucket//run/", "token", nothing_is_read)
    for root, folder in (
        ("s3://bucket/copy", "s3://bucket/run"),
        (str(tmp_path), "s3://b/run"),
        ("s3://b/run", "/run"),
    ):
        assert is_copy(root, folder, "token", nothing_is_read)


def test_the_first_save_makes_the_root(tmp_path: Path) -> None:
    FencingToken(FileStorage(), str(tmp_path / "new" / "root")).acquire()
    assert os.listdir(tmp_path / "new" / "root") == [".ckpt-owner.json"]


def test_the_end_of_a_run_that_lost_the_root_releases_nothing(tmp_path: Path) -> None:
    first, second = FencingToken(FileStorage(), str(tmp_path)), FencingToken(FileStorage(), str(tmp_path))
    first.acquire()
    second.acquire()
    first.release()
    owner = read_owner(FileStorage(), str(tmp_path))
    assert owner is not None and owner.token == second.token and not owner.released
    (tmp_path / ".ckpt-owner.json").unlink()
    second.release()
    assert os.listdir(tmp_path) == []


def test_of_two_that_took_the_root_at_once_one_is_fenced_even_when_the_other_has_ended(tmp_path: Path) -> None:
    first, second = FencingToken(FileStorage(), str(tmp_path)), FencingToken(FileStorage(), str(tmp_path))
    first.acquire()
    (tmp_path / ".ckpt-owner.json").unlink()  # as if the second had looked before it was there
    second.acquire()
    second.release()
    with pytest.raises(CheckpointFencedError):
        first.acquire()


def test_an_owner_of_which_the_start_is_not_known_may_be_alive(tmp_path: Path) -> None:
    FencingToken(FileStorage(), str(tmp_path)).acquire()
    path = tmp_path / ".ckpt-owner.json"
    values = json.loads(path.read_bytes())
    del values["started"], values["released"]  # as in files of early versions
    path.write_text(json.dumps(values))
    assert FencingToken(FileStorage(), str(tmp_path)).other() is not None


def test_an_attempt_of_a_run_that_lost_the_root_commits_nothing(tmp_path: Path) -> None:
    fs, first = FileStorage(), FencingToken(FileStorage(), str(tmp_path))
    first.acquire()
    attempt = commit.new_attempt(fs, str(tmp_path / "one"), new_token(), first.token)
    commit.begin(attempt)
    FencingToken(fs, str(tmp_path)).acquire()
    with pytest.raises(CheckpointFencedError):
        commit.publish(attempt, [{"rank": 0, "files": []}], {}, {})
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"generation": 1}',
        b'{"generation": "1", "token": "a", "host": "b", "pid": 1, "since": 1.5}',
        b'{"generation": 1, "token": "a", "host": 2, "pid": 1, "since": 1.5}',
    ],
)
def test_a_file_that_is_damaged_is_written_again(content: bytes, tmp_path: Path) -> None:
    ownership = FencingToken(FileStorage(), str(tmp_path))
    ownership.acquire()
    path = tmp_path / ".ckpt-owner.json"
    path.write_bytes(content)
    ownership.acquire()
    assert json.loads(path.read_bytes())["token"] == ownership.token


def test_two_that_take_the_root_at_once_never_meet_in_a_temporary_name(tmp_path: Path) -> None:
    """They have no name in common until the rename, whoever is first."""
    first_is_between, second_is_done = threading.Event(), threading.Event()

    class Slow(FileStorage):
        def replace(self, source: str, target: str) -> None:
            first_is_between.set()
            assert second_is_done.wait(60)
            super().replace(source, target)

    slow, quick = FencingToken(Slow(), str(tmp_path)), FencingToken(FileStorage(), str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(slow.acquire)
        assert first_is_between.wait(60)
        quick.acquire()
        second_is_done.set()
        taking.result(60)
    with pytest.raises(CheckpointFencedError):
        quick.acquire()
    slow.acquire()
    assert os.listdir(tmp_path) == [".ckpt-owner.json"]


@pytest.mark.slow
def test_two_managers_that_save_at_once_end_with_one_owner(tmp_path: Path) -> None:
    usual = ["checkpoint.save.at_end=false"]
    for attempt in range(10):
        root = tmp_path / str(attempt)
        managers = [build_manager("async_persistent", usual, dir=root) for _ in range(2)]
        for step, manager in enumerate(managers, 1):
            manager.save(step, {"weight": torch.ones(3)})
        fenced = 0
        for manager in managers:
            try:
                manager.close()
            except (CheckpointFencedError, CheckpointExistsError):
                fenced += 1
        assert fenced <= 1 and not list(root.glob(f"{NEW_PREFIX}*"))


def test_what_a_run_left_that_died_in_an_overwrite_is_swept(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(3)})
    code = "from ckpt_component.core.storage.new_names import new_path; import sys; open(new_path(sys.argv[1]), 'w')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / ".ckpt-owner.json")], timeout=60, check=True)
    (dead,) = tmp_path.glob(f"{NEW_PREFIX}*")
    old, young = (Path(new_path(str(tmp_path / ".ckpt-owner.json"))) for _ in range(2))
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    with build_manager("sync", dir=tmp_path) as manager:
        manager.restore({"weight": torch.zeros(3)})
    assert not dead.exists() and not old.exists()
    assert young.exists()  # its process lives, and may be about to rename it


def test_a_run_that_only_restores_takes_nothing_over(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as training:
        training.save(1, {"weight": torch.ones(3)})
        with build_manager("sync", dir=tmp_path) as evaluation:
            assert evaluation.restore({"weight": torch.zeros(3)}) == 1
        assert training.save(2, {"weight": torch.ones(3)})


def test_a_manager_that_lost_its_root_is_told_at_its_next_save(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3)}
    with (
        build_manager("sync", ["checkpoint.save.at_end=false"], dir=tmp_path) as old,
        build_manager("sync", dir=tmp_path) as new,
    ):
        old.save(1, state)
        new.save(2, state)
        with pytest.raises(CheckpointFencedError, match=r"Another manager of this process .*checkpoint\.dir"):
            old.save(3, state)
        new.save(4, state)
        assert new.steps() == [1, 2, 4]
    assert not list(tmp_path.glob(".ckpt-tmp.*"))


STOPPED = """
    import signal, sys, threading, torch
    from ckpt_component import CheckpointExistsError, CheckpointFencedError, build_manager
    from ckpt_component.core.storage.files import FileStorage

    write_new = FileStorage.write_new

    def stop_before_the_commit(self, path, data, **options):
        write_new(self, path, data, **options)
        if path.endswith("manifest.json") and "iter_0000002" in path:
            # To this very thread: a stop sent to the process may reach it after the owner was looked up.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    FileStorage.write_new = stop_before_the_commit
    manager = build_manager(sys.argv[2], dir=sys.argv[1])
    state = {"weight": torch.ones(1000)}
    manager.save(1, state)
    manager.wait()
    try:
        manager.save(2, state)
        manager.wait()
    except CheckpointFencedError as error:
        print("fenced:", error)
    manager.close()
"""


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_run_that_was_stopped_before_its_commit_finds_a_new_owner(preset: str, tmp_path: Path) -> None:
    old = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STOPPED), str(tmp_path), preset], stdout=subprocess.PIPE, text=True
    )
    try:
        os.waitpid(old.pid, os.WUNTRACED)
        state = {"weight": torch.zeros(1000)}
        with build_manager("sync", ["checkpoint.timeouts.close=0.5", "checkpoint.takeover=true"], dir=tmp_path) as new:
            assert new.restore(state) == 1
            state["weight"].fill_(5)
            new.save(3, state)
        os.kill(old.pid, signal.SIGCONT)
        told, _ = old.communicate(timeout=60)
    finally:
        old.kill()
        old.wait()
    assert told.startswith("fenced: Another run took over"), told
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.steps() == [1, 3]
    assert not list(tmp_path.glob(".ckpt-tmp.*"))
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(tmp_path / "iter_0000003")["weight"].eq(5).all()
