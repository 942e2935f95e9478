"""Uploads from a local folder to a bucket: cut off at every request, throttled, and continued by the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cloud.server import Bucket

from ckpt_component import build_manager
from ckpt_component.catalogue.verification import verify_checkpoint
from ckpt_component.storage.locate import storage_at
from ckpt_component.storage.names import MEGATRON
from ckpt_component.storage.retention import RetentionPolicy
from ckpt_component.storage.scan import scan_steps
from ckpt_component.uploading.policy import UploadPolicy
from ckpt_component.uploading.process import RunWatch, Uploader

pytestmark = pytest.mark.slow


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A local folder with two checkpoints of 10 MB."""
    with build_manager("sync", ["checkpoint.durability=process_crash"], dir=tmp_path / "fast") as manager:
        for step in (1, 2):
            manager.save(step, {"value": torch.rand(2_500_000), "step": step})
    return str(tmp_path / "fast")


def upload(source: str, target: str, **values: Any) -> list[dict[str, Any]]:
    """What the process of a run that has ended does and says."""
    policy = UploadPolicy(source, target, MEGATRON, RetentionPolicy(last=1), run="me", **values)
    run, messages = RunWatch(policy), list[dict[str, Any]]()
    run.ended.set()
    Uploader(policy, run, messages.append).run()
    return messages


def test_a_bucket_gets_the_newest(saved: str, bucket: Bucket) -> None:
    target = f"s3://{bucket.name}/run"
    messages = upload(saved, target)
    assert [message["uploaded"] for message in messages if "uploaded" in message] == [2]
    storage = storage_at(target)
    assert scan_steps(storage, target, MEGATRON).committed == [2]
    assert verify_checkpoint(storage, f"{target}/iter_0000002")
    assert upload(saved, target) == [{"remote": 2}]
