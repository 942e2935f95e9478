"""What a receiver refuses, in words; the folder stays as it is, and the next whole version gets it going again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published import Source, assert_at, bytes_of, leftovers, pull, random_state, stepped, version_at

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
)
from ckpt_component.publishing.delta import DeltaFiles
from ckpt_component.publishing.receiver import Receiver
from ckpt_component.publishing.versions import Version, Versions


def test_a_folder_with_something_else(source: Source, folder: str) -> None:
    source.chain(1, 1)
    os.makedirs(folder)
    Path(folder, "thesis.txt").write_text("years")
    with pytest.raises(CheckpointExistsError, match="has no version that was pulled"):
        pull(source, folder)
    assert os.listdir(folder) == ["thesis.txt"] and os.listdir(os.path.dirname(folder)) == ["model"]


def test_a_link(source: Source, folder: str, tmp_path: Path) -> None:
    source.chain(1, 1)
    os.makedirs(tmp_path / "disk")
    os.makedirs(os.path.dirname(folder))
    os.symlink(tmp_path / "disk", folder)
    with pytest.raises(CheckpointConfigError, match="is a link"):
        pull(source, folder)


def test_a_folder_in_a_bucket(source: Source) -> None:
    with pytest.raises(CheckpointConfigError, match="to a folder of this host"):
        Receiver(source.root, "s3://bucket/model")


def test_another_source_unless_it_is_meant(tmp_path: Path, folder: str) -> None:
    one, other = Source(tmp_path / "one"), Source(tmp_path / "other")
    one.chain(1, 2)
    other.chain(2, 3)
    pull(one, folder)
    with pytest.raises(CheckpointExistsError, match=r"version 2 of .*/one, not of .*/other; .*--replace"):
        pull(other, folder)
    assert_at(one, folder, 2)
    with Receiver(other.root, folder, replace=True) as receiver:
        assert receiver.pull().changed is None
    assert_at(other, folder, 3)


def test_two_receivers_of_one_folder(source: Source, folder: str) -> None:
    source.chain(1, 1)
    with Receiver(source.root, folder), pytest.raises(CheckpointInUseError, match="brings .* to versions"):
        pull(source, folder)
    pull(source, folder)


def test_a_version_that_is_not_there(source: Source, folder: str) -> None:
    os.makedirs(source.root)
    with pytest.raises(CheckpointNotFoundError, match="has no version of weights yet"):
        pull(source, folder)
    source.chain(2, 4)
    with pytest.raises(CheckpointNotFoundError, match="has no version 1; it has 2 to 4"):
        pull(source, folder, 1)
    assert version_at(folder) is None


def test_a_gap_in_the_chain(source: Source, folder: str) -> None:
    source.chain(1, 5)
    pull(source, folder, 2)
    shutil.rmtree(source.path(4))
    with pytest.raises(CheckpointNotFoundError):
        pull(source, folder)
    assert_at(source, folder, 2)
    source.whole(6, random_state(6))
    pull(source, folder)
    assert_at(source, folder, 6)


def files_of(*versions: Path) -> Iterator[Path]:
    for version in versions:
        yield from (path for path in sorted(version.iterdir()) if path.name != "manifest.json")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("has", [None, 2])
def test_damage_in_any_file(tmp_path: Path, folder: str, has: int | None) -> None:
    source = Source(tmp_path / "to", shards=2)
    source.chain(1, 3)
    if has:
        pull(source, folder, has)
    read = [3] if has else [1, 2, 3]
    for path in files_of(*map(source.path, read)):
        size = path.stat().st_size
        for position in (0, size // 2, size - 1):
            flip(path, position)
            with pytest.raises(CheckpointCorruptError, match=path.name):
                pull(source, folder)
            assert version_at(folder) == has and not leftovers(folder)
            flip(path, position)
    if has:
        assert_at(source, folder, has)
    flip(next(files_of(source.path(3))), 5)
    source.whole(4, random_state(4))
    pull(source, folder)
    assert_at(source, folder, 4)


def test_a_folder_that_was_changed_gets_a_whole_version(
    source: Source, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    source.chain(1, 3, scale=20)
    pull(source, folder, 2)
    path = Path(folder, "model.safetensors")
    name = next(name for name, data in bytes_of(source.states[3]).items() if data != bytes_of(source.states[2])[name])
    flip(path, path.read_bytes().index(bytes_of(source.states[2])[name]))
    pull(source, folder)
    assert_at(source, folder, 3)
    assert "Reading a whole version" in caplog.text


def test_a_damaged_state_costs_a_whole_version(source: Source, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    source.chain(1, 3)
    pull(source, folder, 2)
    Path(folder, ".ckpt-version.json").write_text('{"version": "x"}')
    assert pull(source, folder).changed is None
    assert_at(source, folder, 3)
    assert "is damaged" in caplog.text


def test_following_a_damaged_version_waits_for_a_newer_one(
    source: Source, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    source.chain(1, 2)
    pull(source, folder)
    source.delta(3, stepped(source.states[2], 3))
    flip(next(files_of(source.path(3))), -1)
    with Receiver(source.root, folder) as receiver:
        with pytest.raises(CheckpointTimeoutError, match=r"within 0.5 s .*stays at version 2"):
            [*receiver.follow(0.01, timeout=0.5)]
        assert caplog.text.count("until that is over") == 1
        source.whole(4, random_state(4))
        assert next(receiver.follow(0.01, timeout=10)).version == 4
    assert_at(source, folder, 4)


@pytest.mark.slow
def test_following_a_source_without_a_version_looks_as_often_as_it_is_told(
    source: Source, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs(source.root)
    genuine, looks = Versions.look, 0

    def look(versions: Versions) -> dict[int, Version]:
        nonlocal looks
        looks += 1
        return genuine(versions)

    monkeypatch.setattr(Versions, "look", look)
    with Receiver(source.root, folder) as receiver, pytest.raises(CheckpointTimeoutError, match="at no version"):
        next(receiver.follow(0.01, timeout=2))
    assert looks > 20, "pauses became longer"


def test_following_a_source_that_cannot_be_listed_tries_it_again(
    source: Source, folder: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    source.chain(1, 1)
    away = tmp_path / "away"
    with Receiver(source.root, folder) as receiver:
        versions = receiver.follow(0.01, timeout=5)
        next(versions)
        os.rename(source.root, away)
        Path(source.root).write_text("no folder")
        with pytest.raises(CheckpointTimeoutError):
            [*receiver.follow(0.01, timeout=0.3)]
        assert caplog.text.count("until that is over") == 1
        os.unlink(source.root)
        os.rename(away, source.root)
        source.delta(2, stepped(source.states[1], 2))
        assert next(versions).version == 2
        versions.close()
    assert_at(source, folder, 2)


def test_versions_that_are_deleted_while_they_are_read(
    source: Source, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.chain(1, 4)
    pull(source, folder, 2)
    is_pruned = False

    def prune(*arguments: Any) -> DeltaFiles:
        nonlocal is_pruned
        if not is_pruned:
            is_pruned = True
            source.whole(5, random_state(5))
            for number in (1, 2, 3, 4):
                shutil.rmtree(source.path(number))
        return DeltaFiles(*arguments)

    monkeypatch.setattr("ckpt_component.publishing.fetched.DeltaFiles", prune)
    with Receiver(source.root, folder) as receiver:
        versions = receiver.follow(0.01, timeout=10)
        assert next(versions).version == 5
        versions.close()
    assert_at(source, folder, 5)


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_version_without_a_file_or_with_a_damaged_manifest_does_not_count(
    source: Source, folder: str, is_missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source.chain(1, 3)
    if is_missing:
        next(files_of(source.path(3))).unlink()
    else:
        flip(source.path(3) / "manifest.json", 30)
    assert pull(source, folder).version == 2
    assert_at(source, folder, 2)
    assert "weight_v000003" in caplog.text


@pytest.mark.parametrize("package", ["xxhash", "zstandard"])
def test_a_package_that_is_missing(source: Source, folder: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source.chain(1, 2)
    monkeypatch.setitem(sys.modules, package, None)
    pull(source, folder, 1)  # which is whole
    with pytest.raises(CheckpointConfigError, match=rf"needs the package {package}: pip install '.*\[publish\]'"):
        pull(source, folder)
    assert_at(source, folder, 1)
