"""A local folder in front of a bucket that is slow, and what is left when one of them or all processes are lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from cloud.proxy import FaultProxy
from cloud.server import Bucket

from ckpt_component import build_manager
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.events import read_events
from ckpt_component.formats.verification import verify_checkpoint
from ckpt_component.managing.manager import CheckpointManager

pytestmark = pytest.mark.slow

#: Saves a step of 2 MB, and waits.
TRAINER = """
import sys, torch
from ckpt_component import build_manager
with build_manager("async_persistent", [f"checkpoint.local.dir={sys.argv[1]}"], dir=sys.argv[2]) as manager:
    manager.save(3, {"value": torch.full((500_000,), 3.0)})
    manager.wait()
    sys.stdin.read()
"""


def manager_of(local: Path, url: str, *overrides: str) -> CheckpointManager:
    usual = [f"checkpoint.local.dir={local}", "checkpoint.save.at_end=false", *overrides]
    return build_manager("sync", usual, dir=url)


def committed(url: str) -> list[int]:
    return scan_steps(storage_at(url), url, MEGATRON).committed


def manifests(bucket: Bucket) -> list[str]:
    """Those of committed checkpoints; asked of the server, not through the proxy."""
    return [key for key in bucket.keys() if key.endswith("/manifest.json")]  # noqa: SIM118


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100  # on a busy machine
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_goes_on_and_each_of_both_alone_is_enough(
    tmp_path: Path, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, local, state = f"{bucket.url}/run", tmp_path / "fast", {"value": torch.zeros(100_000)}
    with manager_of(local, url) as manager:
        assert manager.restore(state) is None
        proxy.bytes_per_second = 100e3  # four seconds for a checkpoint
        for step in range(1, 7):
            state["value"].fill_(step)
            assert manager.save(step, state)
            until(lambda: any("iter_0000001" in request.key for request in proxy.log))
        assert (local / "iter_0000006").exists() and not manifests(bucket)
        assert "6 steps behind step 6" in caplog.text and "is skipped, because step 1 is still" in caplog.text
        proxy.bytes_per_second = None
    assert committed(url) == [1, 6]
    lags = {event["step"]: event["lag_steps"] for event in read_events(local) if event["event"] == "upload"}
    assert lags == {1: 5, 6: 0}

    shutil.rmtree(local)
    for name in ("ENDPOINT_URL", "REGION", "DEFAULT_REGION", "ALLOW_HTTP", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    options = [f"+checkpoint.storage.options.{name}={value}" for name, value in bucket.options.items()]
    for other, resume in ((url, "auto"), (f"{bucket.url}/branch", f"{url}/iter_0000006")):
        value = {"value": torch.zeros(100_000)}
        with manager_of(tmp_path / resume[:4], other, f"checkpoint.resume={resume}", *options) as manager:
            assert manager.restore(value) == 6 and torch.equal(value["value"], state["value"])
            assert manager.restored_from == f"{url}/iter_0000006"
            manager.save(7, value)
        assert f"{other.removeprefix(bucket.url)[1:]}/iter_0000007/manifest.json" in manifests(bucket)
    texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*.json*")]
    assert texts and not any("not-a-secret" in text for text in texts)


def test_after_a_kill_of_trainer_writer_and_uploader_the_next_run_goes_on(
    tmp_path: Path, bucket: Bucket, proxy: FaultProxy
) -> None:
    url, local = f"{bucket.url}/run", tmp_path / "fast"
    proxy.bytes_per_second = 500e3
    command = [sys.executable, "-c", TRAINER, str(local), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as trainer:
        until(lambda: any("iter_0000003" in request.key for request in proxy.log))
        for process in [*psutil.Process(trainer.pid).children(), psutil.Process(trainer.pid)]:
            process.kill()
    assert trainer.returncode == -signal.SIGKILL and not manifests(bucket)
    proxy.bytes_per_second = None
    state = {"value": torch.zeros(500_000)}
    with manager_of(local, url) as manager:
        assert manager.restore(state) == 3 and manager.restored_from == str(local / "iter_0000003")
    assert committed(url) == [3] and verify_checkpoint(storage_at(url), f"{url}/iter_0000003")
