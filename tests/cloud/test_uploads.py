"""Uploads from a local folder to a bucket, also when requests are cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud.proxy import CutAfter, CutBefore, FaultProxy
from cloud.server import Bucket
from cloud.test_object_requests import ALL, is_manifest
from host_processes import HostProcesses
from parted import save_on_hosts
from strides import first_of
from waiting import eventually

from ckpt_component import build_manager
from ckpt_component.background.jobs import RunWatch
from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.background.uploading import Uploader
from ckpt_component.core.commit.cleanup import RetentionPolicy
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.formats.verification import verify_checkpoint
from ckpt_component.hosts.host_uploads import PartNote, note_path, read_note, write_note

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


@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=ALL)])
@pytest.mark.parametrize("fault", [CutBefore, CutAfter])
def test_an_upload_goes_on_after_any_request_that_is_cut(
    fault: Any, stride: int, saved: str, bucket: Bucket, proxy: FaultProxy
) -> None:
    options = {**bucket.options, "endpoint": f"http://127.0.0.1:{proxy.port}", "max_retries": 0}
    failed = 0
    for nth in itertools.count(first_of(stride), stride):
        proxy.clear()
        rule, target = proxy.add(fault(), nth=nth), f"s3://{bucket.name}/run{nth}"
        messages = upload(saved, target, options=options)
        failed += any("failed" in message for message in messages)
        assert sum("uploaded" in message for message in messages) <= 1
        assert scan_steps(storage_at(target), target, MEGATRON).committed == [2]
        assert verify_checkpoint(storage_at(target), f"{target}/iter_0000002")
        # Of a request that is cut afterwards the client knows no status, and the store has the manifest.
        done = [request for request in rule.hits if fault is CutAfter]
        assert sum(is_manifest(request) and (request.status == 200 or request in done) for request in proxy.log) == 1
        if not rule.hits:
            break
    assert failed or stride > 1  # some requests may be cut without harm


@pytest.mark.turns(3)
def test_a_bucket_gets_the_files_of_all_hosts(tmp_path: Path, bucket: Bucket) -> None:
    """One process is killed on its way, and one host says at first what is not so."""
    hosts = ("host-a", "host-b", "host-c")
    save_on_hosts(tmp_path, hosts, 1, 2, elements=500_000)
    job = HostProcesses(tmp_path, hosts, f"s3://{bucket.name}/run", silent_seconds=7.0)
    attempt, manifest = job.attempt(2)
    try:
        job.start("host-b", max_bytes_per_second=1e6)
        job.start("host-a")
        # It says that it has begun before its note does.
        eventually(lambda: read_note(job.storage, note_path(attempt, manifest, "host-b")))
        job.running["host-b"].kill()
        write_note(job.storage, note_path(attempt, manifest, "host-c"), PartNote(attempt=attempt.token))
        job.fails("host-a", "host-b has not gone on sending its files of iter_0000002 for 7 s")
        job.start("host-b")
        job.fails("host-a", "host-c says that it has sent its files of iter_0000002: ")
        assert job.committed() == []
        job.start("host-c")
        job.end()
    finally:
        job.close()
    assert job.committed() == [2]
    assert not [key for key in bucket.keys() if ".ckpt-part" in key]  # noqa: SIM118


@pytest.mark.turns(3)
@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=ALL)])
@pytest.mark.parametrize("fault", [CutBefore, CutAfter])
def test_uploads_of_hosts_go_on_after_any_request_that_is_cut(
    fault: Any, stride: int, tmp_path: Path, bucket: Bucket, proxy: FaultProxy
) -> None:
    hosts, options = ("host-a", "host-b"), {**bucket.options, "max_retries": 0}
    save_on_hosts(tmp_path, hosts, 2)
    for nth in itertools.count(first_of(stride), stride):
        proxy.clear()
        rule = proxy.add(fault(), nth=nth)
        options["endpoint"] = f"http://127.0.0.1:{proxy.port}"
        job = HostProcesses(tmp_path, hosts, f"s3://{bucket.name}/run{nth}", options=options)
        try:
            job.start(*hosts)
            job.end()
        finally:
            job.close()
        assert job.committed() == [2]
        if not rule.hits:
            break
