"""Several hosts, each with a folder of its own in front of `checkpoint.dir`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from snapshots import Life, live, lose

pytestmark = [pytest.mark.usefixtures("left_on_purpose"), pytest.mark.slow]

FOUR = ["a", "a", "b", "b", "c", "c", "d", "d"]
PEERS = ["checkpoint/recovery=peers"]


def local(folder: Path, *more: str) -> list[str]:
    """Overrides that give each host a folder of its own."""
    name = f"{folder}/disks/${{oc.env:CKPT_HOST}}/run"
    return [f"checkpoint.local.dir={name}", "checkpoint.upload.finish_seconds=1", *more]


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
    assert [line for life in after for line in life.output.splitlines() if "WARNING" in line or "ERROR" in line] == []
