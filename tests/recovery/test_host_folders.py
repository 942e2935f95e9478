"""Several hosts, each with a folder of its own in front of `checkpoint.dir`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from snapshots import Life, finish_lives, live, lose, start_lives

pytestmark = [pytest.mark.usefixtures("left_on_purpose"), pytest.mark.slow]

FOUR = ["a", "a", "b", "b", "c", "c", "d", "d"]
PEERS = ["checkpoint/recovery=peers"]


#: So that nothing gets to `checkpoint.dir` in the time of a test.
NO_UPLOADS = ["checkpoint.upload.finish_seconds=1", "checkpoint.upload.max_bytes_per_second=100"]


UPLOADS = ["checkpoint.upload.finish_seconds=30", "checkpoint.upload.max_bytes_per_second=null"]


def local(folder: Path, *more: str) -> list[str]:
    """Overrides that give each host a folder of its own."""
    return [f"checkpoint.local.dir={folder}/disks/${{oc.env:CKPT_HOST}}/run", *NO_UPLOADS, *more]


def disk(folder: Path, host: str) -> Path:
    return folder / "disks" / host / "run"


def run(folder: Path, hosts: Sequence[str], *more: str, **plan: Any) -> list[Life]:
    """A run without snapshots in memory, whose saves go to the folders of its hosts."""
    plan = {"recovery": False, **plan}
    return live(folder, hosts=[*hosts], overrides=local(folder, *more), **plan)


def has(lives: list[Life], step: int, before: list[Life]) -> None:
    """Each rank begins with what the rank of that number had after a step."""
    assert {life.restored[0] for life in lives} == {step}
    assert [life.told["began"] for life in lives] == [life.told["digests"][str(step)] for life in before]


@pytest.mark.turns(3)
def test_a_run_goes_on_from_the_folders_of_its_hosts(tmp_path: Path) -> None:
    before = run(tmp_path, FOUR, steps=3, durable=[1, 3], end="kill")
    for host in "abcd":
        folder = disk(tmp_path, host) / "iter_0000003"
        manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
        assert set(manifest["hosts"]) == {*"abcd"}
        files = {path.name for path in (folder / manifest["at"]).iterdir()}
        assert files == set(manifest["hosts"][host]), "each host has its own files alone"
    after = run(tmp_path, FOUR)
    has(after, 3, before)
    assert "each host has a folder of its own" in after[0].output
    assert not any("ERROR" in life.output for life in after)


@pytest.mark.turns(3)
def test_all_fall_back_together_when_the_disk_of_a_host_is_lost(tmp_path: Path) -> None:
    run(tmp_path, FOUR, *UPLOADS, steps=1, durable=[1])
    run(tmp_path, FOUR, steps=3, durable=[3], end="kill")
    shutil.rmtree(disk(tmp_path, "b"))
    after = run(tmp_path, FOUR, steps=4, durable=[3, 4])
    assert {life.restored for life in after} == {(1, "storage")}
    assert f"restored step 1 from {tmp_path}/run" in after[0].output
    told = after[0].output
    assert told.count("step 3 is left alone: ") == 1 and "of host b are not here" in told
    assert "step 3 is saved anew, and replaces what is left of it" in told
    assert not (disk(tmp_path, "a") / "iter_0000001").exists(), "what is left of an older step goes with the older ones"
    assert not any("ERROR" in life.output for life in after)
    has(run(tmp_path, FOUR), 4, after)


@pytest.mark.turns(3)
def test_what_is_lost_with_a_disk_comes_from_the_peers(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"recovery": True, "at_peers": 3, "end": "kill"}
    before = run(tmp_path, FOUR, *PEERS, steps=3, durable=[2], **plan)
    lose("b")
    shutil.rmtree(disk(tmp_path, "b"))
    after = run(tmp_path, ["a", "a", "e", "e", "c", "c", "d", "d"], *PEERS, recovery=True)
    has(after, 3, before)
    assert "restored step 3 from peers" in after[0].output


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "hosts",
    [pytest.param(["a", "b"], marks=pytest.mark.soak), ["b", "b", "a", "x"]],
    ids=lambda hosts: "".join(hosts),
)
def test_another_number_of_ranks_goes_on_too(hosts: list[str], tmp_path: Path) -> None:
    before = run(tmp_path, ["a", "a", "b"], steps=3, durable=[3], end="kill")
    after = run(tmp_path, hosts, steps=4, durable=[4])
    assert {(life.restored[0], life.told["began"]) for life in after} == {(3, before[0].told["digests"]["3"])}
    has(run(tmp_path, hosts), 4, after)


def test_one_host_alone_does_not_begin_beside_a_part(tmp_path: Path) -> None:
    run(tmp_path, ["a", "b"], steps=3, durable=[3], end="kill")
    (alone,) = run(tmp_path, ["a"], end="raise")
    assert "a part of a checkpoint" in alone.told["failed"] and "host b" in alone.told["failed"]
    assert alone.told["untouched"]


def test_a_file_in_place_of_a_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    disk(tmp_path, "c").parent.mkdir(parents=True)
    disk(tmp_path, "c").write_text("")
    for life in run(tmp_path, ["a", "b", "c", "c"], end="raise"):
        assert "ConfigError: On rank 2: checkpoint.local.dir=" in life.told["refused"]
        assert "is a file, or lies below one. Name a folder." in life.told["refused"]


def test_another_folder_than_that_of_its_host_is_refused_on_all_ranks(tmp_path: Path) -> None:
    other = {"3": {"overrides": local(tmp_path, f"checkpoint.local.dir={tmp_path}/typo")}}
    for life in run(tmp_path, ["a", "a", "b", "b"], end="raise", ranks=other):
        assert "ConfigError: On rank 3: checkpoint.local.dir=" in life.told["refused"]
        assert "another folder than that of rank 2, which is on the same host" in life.told["refused"]
    assert not [*tmp_path.rglob(".ckpt-trial.*")]


@pytest.mark.turns(3)
def test_hosts_that_share_a_folder_go_on_from_it(tmp_path: Path) -> None:
    shared = [f"checkpoint.local.dir={tmp_path}/shared", *NO_UPLOADS]
    plan: dict[str, Any] = {"hosts": ["a", "a", "b", "b"], "recovery": False, "overrides": shared}
    before = live(tmp_path, steps=3, durable=[3], end="kill", **plan)
    manifest = json.loads((tmp_path / "shared" / "iter_0000003" / "manifest.json").read_text())["manifest"]
    assert "hosts" not in manifest
    after = live(tmp_path, **plan)
    has(after, 3, before)
    assert "all hosts share one folder" in after[0].output


@pytest.fixture
def dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the process that does this operation die with it; none if it is empty."""

    def at(operation: str) -> None:
        monkeypatch.setenv("CKPT_FAILPOINT", f"{operation}:action=kill" if operation else "")
        monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "operations"))

    return at


@pytest.mark.turns(3)
def test_a_host_that_dies_before_it_has_the_manifest_has_the_checkpoint(
    dies: Callable[[str], None], tmp_path: Path
) -> None:
    dies("replace:process=trainer:path=disks/b/run/iter_0000003/manifest.json")
    overrides = local(tmp_path)
    plan: dict[str, Any] = {"recovery": False, "steps": 3, "durable": [3], "overrides": overrides, "together": False}
    lives = finish_lives(start_lives(tmp_path, hosts=["a", "b", "b"], end="kill", **plan))
    assert "is not on all hosts" in lives[0].output and "iter_0000003 committed" in lives[0].output
    assert not (disk(tmp_path, "b") / "iter_0000003" / "manifest.json").exists()
    dies("")
    after = run(tmp_path, ["a", "b", "b"], "checkpoint.save.every_steps=null")  # which only restores
    assert {life.restored for life in after} == {(3, "storage")}
    assert after[2].told["began"] == lives[2].told["digests"]["3"]


@pytest.mark.turns(3)
def test_a_host_that_dies_while_it_writes_leaves_the_step_before(dies: Callable[[str], None], tmp_path: Path) -> None:
    dies("sync_folder:process=trainer:path=disks/b/run/iter_0000003")
    plan: dict[str, Any] = {"recovery": False, "overrides": local(tmp_path, "checkpoint.timeouts.heartbeat=4")}
    lives = finish_lives(start_lives(tmp_path, hosts=["a", "b", "b"], steps=3, durable=[2, 3], **plan))
    assert all(life.code != 0 for life in lives) and "3" not in lives[0].told.get("digests", {})
    dies("")
    after = run(tmp_path, ["a", "b", "b"], steps=3, durable=[3])
    assert {life.restored for life in after} == {(2, "storage")}
    has(run(tmp_path, ["a", "b", "b"]), 3, after)
    assert "that another process is finishing" not in after[0].output, "nobody finishes what the dead host has begun"


@pytest.mark.turns(3)
def test_the_memory_of_peers_is_found_when_another_host_leads_whose_folder_has_another_name(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"recovery": True, "at_peers": 3, "end": "kill"}
    before = run(tmp_path, ["a", "b", "c"], *PEERS, steps=3, durable=[2], **plan)
    has(run(tmp_path, ["c", "a", "b"], *PEERS, recovery=True), 3, before)
