"""Versions never lie among checkpoints, and a folder knows its source, however the folders are spelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from bound import asked, bound
from published import Source, assert_at, pull, random_state

from ckpt_component import CheckpointConfigError, CheckpointExistsError, build_manager
from ckpt_component.publishing.receiver import Receiver


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with a checkpoint, and links: `link` to it, `above` to what it is in, `one` to its checkpoint."""
    folder = tmp_path / "lustre" / "run"
    with build_manager("sync", ["checkpoint.save.every_steps=1"], dir=folder) as manager:
        manager.save(1, {"weight": torch.zeros(4)})
    (tmp_path / "link").symlink_to("lustre/run")
    (tmp_path / "above").symlink_to(tmp_path / "lustre")
    (tmp_path / "one").symlink_to("link/iter_0000001")
    monkeypatch.chdir(tmp_path)
    return folder


SAME = "is the same folder as checkpoint.dir="
INSIDE = "is in a checkpoint of checkpoint.dir="


@pytest.mark.parametrize(
    ("to", "dir", "text"),
    [
        ("link", "lustre/run", SAME),
        ("lustre/run", "link", SAME),
        ("above/run/", "lustre/run", SAME),
        ("link/../link", "above/run", SAME),
        ("run", "../lustre/run", SAME),  # in the linked working folder `above`
        ("link/iter_0000001", "lustre/run", INSIDE),
        ("above/run/iter_0000001/weights", "lustre/run", INSIDE),
        ("one/weights", "lustre/run", INSIDE),
        ("lustre/run/iter_0000002", "link", INSIDE),  # which is not there yet
        ("one", "elsewhere", "is in the checkpoint "),  # that of another run
        ("above/run/iter_0000001/weights", "elsewhere", "is in the checkpoint "),
    ],
)
def test_versions_among_checkpoints_are_refused_however_they_are_spelled(
    run: Path, to: str, dir: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dir.startswith(".."):
        monkeypatch.chdir("above")
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointConfigError) as caught:
        build_manager("sync", [f"checkpoint.publish.to={to}", f"checkpoint.dir={dir}", "checkpoint.publish.delta=off"])
    with pytest.raises(CheckpointConfigError):
        build_manager("sync", [f"checkpoint.publish.to={to}", "checkpoint.publish.delta=off"], dir=dir)
    assert f"checkpoint.publish.to={to} {text}" in str(caught.value)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("mirror", ["link", "above/run", "link/iter_0000001", "one/mirror", "weights/"])
def test_a_mirror_among_checkpoints_is_refused_however_it_is_spelled(run: Path, mirror: str) -> None:
    Path("real").mkdir()
    Path("weights").symlink_to("real")
    publish = ["checkpoint.publish.to=real", f"checkpoint.publish.mirror={mirror}", "checkpoint.publish.delta=off"]
    with pytest.raises(CheckpointConfigError, match=r"give the mirror one of its own\."):
        build_manager("sync", publish, dir=run)


def test_a_folder_of_its_own_may_be_below_that_of_the_checkpoints(run: Path) -> None:
    build_manager("sync", ["checkpoint.publish.to=link/weights", "checkpoint.publish.delta=off"], dir=run).close()


def test_a_mount_is_a_spelling_too(run: Path, tmp_path: Path) -> None:
    publish = "checkpoint.publish.delta=off"
    with bound(run, tmp_path / "bound") as place:
        same = asked("refusal", dir=str(run), overrides=[f"checkpoint.publish.to={place}", publish])
        inside = asked("refusal", dir=str(run), overrides=[f"checkpoint.publish.to={place}/iter_0000002", publish])
    assert SAME in same and INSIDE in inside
    with bound(run / "iter_0000001", tmp_path / "checkpoint") as place:
        inside = asked("refusal", dir=str(run), overrides=[f"checkpoint.publish.to={place}/weights", publish])
    assert f"is in the checkpoint {place}" in inside


@pytest.mark.parametrize("spelling", ["link", "to/", "linked/to", "moved"])
def test_the_source_of_a_folder_is_known_by_what_it_is(
    source: Source, folder: str, tmp_path: Path, spelling: str
) -> None:
    root = Path(source.root)
    source.chain(1, 2)
    pull(source, folder, 1)
    (root.parent / "link").symlink_to(root.name)
    (root.parent / "linked").symlink_to(".")
    if spelling == "moved":
        root.rename(root.parent / "moved")
    named = f"{root.parent}/{spelling}"
    with Receiver(named, folder) as receiver:
        assert receiver.pull(1).nbytes == 0, "the folder has it already"
        assert receiver.pull(2).changed is not None, "only what differs is read"
    assert_at(source, folder, 2)
    with Receiver(named, folder) as receiver:
        assert receiver.pull().nbytes == 0


def test_another_source_with_the_same_numbers_is_another_one(source: Source, folder: str, tmp_path: Path) -> None:
    source.chain(1, 2)
    pull(source, folder, 1)
    other = Source(tmp_path / "other")
    other.whole(1, random_state(7))
    with pytest.raises(CheckpointExistsError, match="version 1 of .*, not of .*/other"):
        Receiver(other.root, folder)
    os.rename(other.root, tmp_path / "aside")
    os.rename(source.root, other.root)
    os.rename(tmp_path / "aside", source.root)
    with Receiver(source.root, folder) as receiver:  # the name is the same, the versions are not
        pulled = receiver.pull(1)
    assert pulled.nbytes > 0 and pulled.changed is None
    assert_at(other, folder, 1)


@pytest.mark.parametrize("target", ["{root}", "{link}", "{root}/weight_v000001", "{link}/weight_v000001/model"])
def test_versions_are_not_pulled_into_their_source(source: Source, tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(source.root)
    source.chain(1, 1)
    before = sorted(Path(source.root).rglob("*"))
    with pytest.raises(CheckpointConfigError, match="name another folder"):
        Receiver(source.root, target.format(root=source.root, link=tmp_path / "link"))
    assert sorted(Path(source.root).rglob("*")) == before
