"""A run finds what is in memory of its folder however the folder is spelled, and only what is of that folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from bound import bound
from snapshots import Life, clients, live, lose, paused
from waiting import eventually

from ckpt_component.core.commit.names import OWNER

pytestmark = pytest.mark.usefixtures("left_on_purpose")


@pytest.fixture
def lustre(tmp_path: Path) -> Path:
    """A folder that `scratch` is a link to."""
    folder = tmp_path / "lustre"
    folder.mkdir()
    (tmp_path / "scratch").symlink_to("lustre")
    return folder


def trained(folder: Path, to: int, by: str | Path, **plan: Any) -> Life:
    """Snapshots up to a step in memory, of a run that spells its folder in this way and is killed."""
    (life,) = live(folder, dir=str(by), steps=to, waits=True, end="kill", **plan)
    return life


def test_runs_that_spell_their_folder_differently_go_on_from_each_other(tmp_path: Path, lustre: Path) -> None:
    began = []
    for number, spelling in enumerate(["lustre/run", "scratch/run", "scratch/../lustre//run/"], 1):
        began.append(trained(tmp_path, 3 * number, f"{tmp_path}/{spelling}").restored)
        eventually(lambda: len(clients()) == 1, 10, "those of the run before have not ended")
    assert began == [(None, None), (3, "memory"), (6, "memory")]


def test_a_relative_path_in_a_working_folder_that_is_a_link(tmp_path: Path, lustre: Path) -> None:
    trained(tmp_path, 2, lustre / "run")
    assert trained(tmp_path, 3, "run", cwd=str(tmp_path / "scratch")).restored == (2, "memory")
    assert trained(tmp_path, 3, "../lustre/run", cwd=str(lustre)).restored == (3, "memory")


def test_a_folder_that_was_moved_has_its_memory(tmp_path: Path, lustre: Path) -> None:
    trained(tmp_path, 2, lustre / "run")
    (lustre / "run").rename(lustre / "moved")
    assert trained(tmp_path, 3, lustre / "run").restored == (None, None)  # another folder has its name now
    assert trained(tmp_path, 4, tmp_path / "scratch/moved").restored == (2, "memory")
    assert trained(tmp_path, 4, lustre / "run").restored == (3, "memory")


def test_a_folder_that_was_moved_to_another_disk_has_its_memory(tmp_path: Path, lustre: Path) -> None:
    trained(tmp_path, 2, lustre / "run")
    shutil.copytree(lustre / "run", tmp_path / "moved", symlinks=True)
    shutil.rmtree(lustre / "run")
    assert trained(tmp_path, 2, tmp_path / "moved").restored == (2, "memory")


def test_a_copy_of_a_folder_has_not_the_memory_of_the_original(tmp_path: Path, lustre: Path) -> None:
    trained(tmp_path, 2, lustre / "run", durable=[1])
    shutil.copytree(lustre / "run", lustre / "copy", symlinks=True)
    of_copy = trained(tmp_path, 3, tmp_path / "scratch/copy")
    assert of_copy.restored == (1, "storage"), "what is committed is in both, the snapshot is not"
    assert f"{tmp_path}/scratch/copy is a copy of {lustre}/run" in of_copy.output
    assert trained(tmp_path, 2, tmp_path / "scratch/run").restored == (2, "memory")
    assert trained(tmp_path, 3, lustre / "copy").restored == (3, "memory")


@pytest.mark.parametrize("spelling", ["lustre/run", "scratch/run"])
def test_a_run_that_the_owner_file_does_not_name_is_not_used(tmp_path: Path, lustre: Path, spelling: str) -> None:
    trained(tmp_path, 2, lustre / "run", durable=[1])
    owner = lustre / "run" / OWNER
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"token": "0badf00d-0badf00e"}))
    assert trained(tmp_path, 1, tmp_path / spelling).restored[0] == 1


def spelled(folder: Path, *by: str) -> dict[str, dict[str, str]]:
    """What is different on each rank: how it spells the folder of the run."""
    return {str(rank): {"dir": str(folder / spelling)} for rank, spelling in enumerate(by)}


def test_ranks_may_spell_the_folder_differently(tmp_path: Path, lustre: Path) -> None:
    plan: dict[str, Any] = {"waits": True, "end": "kill"}
    live(tmp_path, world_size=2, steps=3, ranks=spelled(tmp_path, "lustre/run", "scratch/run"), **plan)
    lives = live(tmp_path, world_size=2, steps=4, ranks=spelled(tmp_path, "scratch/run", "lustre/run"), **plan)
    assert [life.restored for life in lives] == [(3, "memory")] * 2
    eventually(lambda: len(clients()) == 2, 10, "those of the run before have not ended")


def test_hosts_may_spell_the_folder_differently(tmp_path: Path, lustre: Path) -> None:
    plan: dict[str, Any] = {"overrides": ["checkpoint/recovery=peers"], "steps": 3, "at_peers": 3, "end": "kill"}
    live(tmp_path, hosts=["a", "b"], ranks=spelled(tmp_path, "lustre/run", "scratch/run"), **plan)
    lose("a")
    lives = live(tmp_path, hosts=["c", "b"], ranks=spelled(tmp_path, "scratch/run", "lustre/../scratch/run"), **plan)
    assert [life.restored for life in lives] == [(3, "peer"), (3, "memory")]


def test_two_runs_that_spell_one_folder_differently_are_two_runs_in_one_folder(tmp_path: Path, lustre: Path) -> None:
    with paused(tmp_path, dir=str(lustre / "run"), steps=1, durable=[1], waits=True, end="hang"):
        (second,) = live(tmp_path, dir=str(tmp_path / "scratch/run"), end="outside", recovery=False)
    assert "another run saves there" in second.told["refused"] and "CheckpointInUseError" in second.told["refused"]


def test_a_folder_that_is_mounted_in_two_places_is_one(tmp_path: Path, lustre: Path) -> None:
    trained(tmp_path, 2, lustre / "run")
    with bound(lustre, tmp_path / "bound") as place:
        assert trained(tmp_path, 3, place / "run").restored == (2, "memory")
        assert trained(tmp_path, 3, tmp_path / "scratch/run").restored == (3, "memory")
    assert os.listdir(place) == []
