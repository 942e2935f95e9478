"""A folder is one folder, however it is spelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bound import asked, bound

from ckpt_component.core.storage.locate import below, folder_id, same_folder


@pytest.fixture
def lustre(tmp_path: Path) -> Path:
    """A folder with a run in it; `scratch` is a link to it, and `deep/link` one to the run."""
    folder = tmp_path / "lustre"
    (folder / "run" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to("lustre")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link").symlink_to(folder / "run")
    return folder


SPELLINGS = ["lustre/run", "lustre/run/", "lustre//run", "lustre/./run", "lustre/run/iter_0000001/..", "scratch/run"]
SPELLINGS += ["scratch/run/", "scratch/../lustre/run", "deep/link", "deep/../deep/link/"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_of_a_folder_are_one(lustre: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = lustre / "run", f"{lustre.parent}/{spelling}"
    assert same_folder(one, other) and folder_id(one) == folder_id(other)
    assert below(f"{other}/iter_0000001", one) == "iter_0000001" and below(other, one) == ""
    assert below(f"{other}/new/one", one) == "new/one" and below(one, f"{other}/iter_0000001") is None
    monkeypatch.chdir(lustre.parent)
    assert same_folder(spelling, one) and below(spelling, lustre) == "run"


def test_a_relative_path_in_a_working_folder_that_is_a_link(lustre: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lustre.parent / "scratch")
    assert same_folder("run", lustre / "run") and same_folder("./run", lustre.parent / "scratch/run")


def test_two_folders_are_two(lustre: Path) -> None:
    (lustre / "run2").mkdir()
    for other in ("run2", "run/iter_0000001", "", "new", "run2/run"):
        assert not same_folder(lustre / "run", lustre / other)
    assert below(lustre / "run2", lustre / "run") is None  # whose name begins as the other one's


@pytest.mark.parametrize("rest", ["new", "new/folder"])
def test_a_folder_that_is_not_there_yet(lustre: Path, rest: str) -> None:
    one, other = lustre / rest, lustre.parent / "scratch" / rest
    assert same_folder(one, other) and not same_folder(one, lustre / "new2")
    (lustre.parent / "dangling").symlink_to(one)
    assert same_folder(lustre.parent / "dangling", other)
    one.mkdir(parents=True)
    assert same_folder(one, other) and same_folder(lustre.parent / "dangling", other)


def test_a_folder_that_was_moved_is_the_folder(lustre: Path) -> None:
    before = folder_id(lustre / "run")
    (lustre / "run").rename(lustre / "old")
    (lustre / "run").mkdir()
    assert folder_id(lustre / "old") == before != folder_id(lustre / "run")


def test_what_cannot_be_looked_at_has_a_name_all_the_same(lustre: Path) -> None:
    (lustre / "a").symlink_to("b")
    (lustre / "b").symlink_to("a")
    (lustre / "file").write_text("")
    for path in (lustre / "a", lustre / "file" / "below", lustre / ("long" * 100)):
        assert same_folder(path, path) and not same_folder(path, lustre)


def test_a_bucket_is_known_by_its_url() -> None:
    assert folder_id("s3://bucket//run/") == folder_id("S3://bucket/run") == "s3://bucket/run"
    assert below("s3://bucket/run/iter_1/x", "s3://bucket/run/") == "iter_1/x"
    assert below("s3://bucket/run", "s3://bucket") == "run" and below("s3://bucket", "s3://bucket/") == ""
    assert below("s3://bucket/run2", "s3://bucket/run") is None and below("s3://other/run", "s3://bucket") is None
    assert below("/bucket/run", "s3://bucket") is None and below("s3://bucket/run", "/") is None


def test_home_is_a_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert same_folder("~/run", tmp_path / "run") and os.path.basename(tmp_path) == below("~", tmp_path.parent)


def test_a_folder_that_is_mounted_in_two_places_is_one(lustre: Path) -> None:
    with bound(lustre, lustre.parent / "bound") as place:
        paths = [*map(str, (lustre / "run", place / "run", place, lustre, lustre / "new", place / "new", place / "n"))]
        run, run2, all_, all2, new, new2, other = asked("ids", paths=paths)
    assert run == run2 and all_ == all2 and new == new2
    assert len({run, all_, new, other}) == 4
