"""A folder that receives published weights has exactly a version, at any time, and reads no more than it needs."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import traceback
from pathlib import Path

import pytest
from published import Source, assert_at, bytes_of, leftovers, pull, random_state, stepped

from ckpt_component.publishing.receiver import Receiver


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_version_arrives_as_it_was_published(tmp_path: Path, folder: str, encoding: str, shards: int) -> None:
    source = Source(tmp_path / "to", shards)
    source.chain(1, 4, encoding)
    source.whole(5, random_state(5))
    for number in (2, 1, 4, 5):
        pull(source, folder, number)
        assert_at(source, folder, number)
        assert not leftovers(folder)
    assert pull(source, folder).nbytes == 0


def test_a_folder_that_is_behind_reads_the_deltas_alone(source: Source, folder: str) -> None:
    source.chain(1, 4, scale=20)
    whole = pull(source, folder, 1)
    pulled = pull(source, folder)
    assert_at(source, folder, 4)
    assert pulled.nbytes < whole.nbytes / 2
    first, last = (bytes_of(source.states[number]) for number in (1, 4))
    assert pulled.changed is not None
    assert {name for name in first if first[name] != last[name]} <= pulled.changed < {*first}
    assert (pulled.step, whole.changed) == (400, None)
    assert pulled.lag is not None and 0 <= pulled.lag < 60


def test_a_delta_without_a_change(source: Source, folder: str) -> None:
    source.chain(1, 2)
    source.delta(3, source.states[2])
    pull(source, folder, 2)
    assert pull(source, folder).changed == frozenset()
    assert_at(source, folder, 3)


def test_following_goes_on_in_the_folder_that_was_switched_out(source: Source, folder: str) -> None:
    source.chain(1, 1)
    inodes = dict[int, int]()
    with Receiver(source.root, folder) as receiver:
        versions = receiver.follow(0.01, timeout=10)
        for number in range(1, 7):
            assert next(versions).version == number
            assert_at(source, folder, number)
            inodes[number] = os.stat(folder).st_ino
            source.delta(number + 1, stepped(source.states[number], number))
        versions.close()
    assert inodes[2] != inodes[3] and inodes[2] == inodes[4] == inodes[6] and inodes[3] == inodes[5]
    assert not leftovers(folder)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_file_that_is_open_does_not_change(source: Source, folder: str, is_mapped: bool) -> None:
    source.chain(1, 5)
    with Receiver(source.root, folder) as receiver:
        receiver.pull(1)
        with open(f"{folder}/model.safetensors", "rb") as stream:
            data = stream.read()
            view = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) if is_mapped else stream
            if is_mapped:
                stream.close()
            for number in range(2, 6):
                receiver.pull(number)
                assert_at(source, folder, number)
            view.seek(0)
            assert view.read() == data
            view.close()


def test_versions_between_are_skipped(source: Source, folder: str) -> None:
    source.chain(1, 1)
    with Receiver(source.root, folder) as receiver:
        versions = receiver.follow(0.01, timeout=10)
        assert next(versions).version == 1
        for number in (2, 3, 4):
            source.delta(number, stepped(source.states[number - 1], number))
        assert next(versions).version == 4
        versions.close()
    assert_at(source, folder, 4)


def test_following_yields_what_the_folder_has_already(source: Source, folder: str) -> None:
    source.chain(1, 2)
    pull(source, folder)
    with Receiver(source.root, folder) as receiver:
        first = next(receiver.follow(0.01, timeout=10))
    assert (first.version, first.step, first.nbytes) == (2, 200, 0)


def test_an_empty_folder_is_taken(source: Source, folder: str) -> None:
    source.chain(1, 1)
    os.makedirs(folder)
    pull(source, folder)
    assert_at(source, folder, 1)
    assert not leftovers(folder)


def test_a_source_that_began_anew_is_not_taken_for_the_same(source: Source, folder: str) -> None:
    source.chain(1, 3)
    pull(source, folder)
    shutil.rmtree(source.root)
    again = Source(source.root)
    again.whole(1, random_state(77))
    for number in (2, 3, 4):
        again.delta(number, stepped(again.states[number - 1], 70 + number))
    assert pull(again, folder).changed is None
    assert_at(again, folder, 4)


def test_what_a_dead_receiver_left_is_swept(source: Source, folder: str) -> None:
    source.chain(1, 2)
    pull(source, folder, 1)
    half = Path(folder).parent / ".ckpt-pull.model" / "next"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    pull(source, folder)
    assert_at(source, folder, 2)
    assert not leftovers(folder)


def test_a_switch_of_three_steps_that_was_cut_off_is_undone(source: Source, folder: str) -> None:
    source.chain(1, 2)
    pull(source, folder, 1)
    os.rename(folder, Path(folder).parent / ".ckpt-pull.model" / "next.between")
    with Receiver(source.root, folder):
        assert_at(source, folder, 1)


def test_the_source_may_belong_to_another_user(source: Source, folder: str) -> None:
    if os.geteuid():
        pytest.skip("needs root to become another user")
    source.chain(1, 3)
    top = Path(source.root)
    everything = [top, *top.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = [path.stat().st_mtime_ns for path in everything]
    os.makedirs(os.path.dirname(folder))
    os.chmod(os.path.dirname(folder), 0o777)
    for parent in top.parents:
        if parent.owner() == "root" and parent.name.startswith(("pytest-", "popen-", "test_")):
            parent.chmod(0o755)
    pid = os.fork()
    if not pid:
        try:
            os.setgid(65534)
            os.setuid(65534)
            pull(source, folder, 2)
            pull(source, folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert_at(source, folder, 3)
    assert [path.stat().st_mtime_ns for path in everything] == before and [top, *top.rglob("*")] == everything


def test_a_whole_version_has_other_files_than_the_one_before(source: Source, folder: str) -> None:
    source.chain(1, 2)
    pull(source, folder)
    source.shards = 3
    source.whole(3, random_state(5))
    pull(source, folder)
    assert_at(source, folder, 3)
    source.delta(4, stepped(source.states[3], 4))
    source.shards = 1
    source.whole(5, random_state(6))
    pull(source, folder)
    assert_at(source, folder, 5)
