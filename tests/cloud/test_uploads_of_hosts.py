"""Four hosts with a local folder each: what they save gets to `checkpoint.dir` whole, and a run goes on from there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cloud.server import Bucket
from snapshots import Life, live

from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.events import read_events
from ckpt_component.formats.verification import verify_checkpoint

pytestmark = pytest.mark.slow

HOSTS = [*"aabbccdd"]


def run(folder: Path, *more: str, **plan: Any) -> list[Life]:
    name = f"{folder}/disks/${{oc.env:CKPT_HOST}}/run"
    return live(folder, hosts=HOSTS, overrides=[f"checkpoint.local.dir={name}", *more], recovery=False, **plan)


def disk(folder: Path, host: str) -> Path:
    return folder / "disks" / host / "run"


def uploaded(target: str) -> list[int]:
    """The steps that the permanent folder has, whole and in one place."""
    storage = storage_at(target)
    scan = scan_steps(storage, target, MEGATRON)
    for step in scan.committed:
        assert verify_checkpoint(storage, f"{target}/{MEGATRON.folder(step)}")
        assert "hosts" not in scan.manifests[step] and scan.manifests[step]["world_size"] == len(HOSTS)
    return scan.committed


def gets_there_and_comes_back(folder: Path, target: str, lost: str, **plan: Any) -> None:
    """Save on four hosts, lose the disk of one, and go on."""
    before = run(folder, steps=3, durable=[1, 3], **plan)
    assert uploaded(target)[-1] == 3
    for rank, host in ((0, "a"), (2, "b"), (4, "c"), (6, "d")):
        events = [event for event in read_events(disk(folder, host)) if event["event"] == "upload"]
        assert {(event["rank"], event["outcome"]) for event in events} == {(rank, "sent" if rank else "uploaded")}
        assert ("sent its files in" in before[rank].output) == bool(rank)
    shutil.rmtree(disk(folder, lost))
    after = run(folder, steps=4, durable=[4], **plan)
    assert {life.restored for life in after} == {(3, "storage")}
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in before]
    assert uploaded(target)[-1] == 4


@pytest.mark.turns(3)
def test_what_four_hosts_save_gets_to_a_folder_and_comes_back(tmp_path: Path) -> None:
    gets_there_and_comes_back(tmp_path, str(tmp_path / "run"), lost="b")


@pytest.mark.turns(3)
def test_what_four_hosts_save_gets_to_a_bucket_and_comes_back(tmp_path: Path, bucket: Bucket) -> None:
    gets_there_and_comes_back(tmp_path, f"{bucket.url}/run", lost="a", dir=f"{bucket.url}/run")


@pytest.mark.turns(3)
def test_what_is_left_of_a_run_that_was_killed_is_uploaded_by_the_next(tmp_path: Path) -> None:
    slow = "checkpoint.upload.max_bytes_per_second=1000"
    before = run(tmp_path, slow, "checkpoint.upload.finish_seconds=0.1", steps=3, durable=[3], end="kill")
    assert uploaded(str(tmp_path / "run")) == []
    after = run(tmp_path)
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in before]
    assert uploaded(str(tmp_path / "run")) == [3]
