"""Runs that save to a bucket, by each caller, against a real S3 server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud.server import Bucket
from programs import run_program
from ranks import run_ranks

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.errors import CheckpointConfigError
from ckpt_component.events.event_file import read_events

pytestmark = pytest.mark.slow


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((2_500_000,), float(step)), "more": [torch.arange(9), step], "step": step}


def settings(bucket: Bucket) -> list[str]:
    options = [f"+checkpoint.storage.options.{name}={value}" for name, value in bucket.options.items()]
    return [
        f"checkpoint.dir={bucket.url}/runs/one",
        "checkpoint.save.every_steps=1",
        "checkpoint.keep.last=2",
        *options,
    ]


@pytest.fixture
def no_environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the options lead to the server."""
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ALLOW_HTTP", "REGION"):
        monkeypatch.delenv(f"AWS_{name}")
    yield


@pytest.mark.parametrize(
    ("preset", "writer"),
    [
        ("sync", "dcp"),
        ("async_persistent", "dcp"),
        ("async_temporal", "torch_save"),
        ("async_zero_overhead", "torch_save"),
    ],
)
@pytest.mark.usefixtures("no_environment")
def test_a_run_in_a_bucket(bucket: Bucket, preset: str, writer: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with build_manager(preset, [*settings(bucket), f"checkpoint/writer={writer}"]) as manager:
        for step in range(1, 4):
            manager.maybe_save(step, state(step))
    keys = bucket.keys("runs/one")
    folders = {key.split("/")[2] for key in keys}
    assert {name for name in folders if name.startswith("iter")} == {"iter_0000002", "iter_0000003"}
    assert not any(".ckpt-alive" in key or ".ckpt-trial" in key or key.endswith(".draft") for key in keys)
    assert bucket.store().get("runs/one/latest_checkpointed_iteration.txt").bytes() == b"3"
    for key in keys:
        if not key.endswith((".distcp", ".pt")):
            assert bucket.options["secret_access_key"].encode() not in bytes(bucket.store().get(key).bytes()), key
    assert bucket.options["secret_access_key"] not in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings


@pytest.mark.parametrize("caller", ["inline", "persistent"])
def test_a_checkpointer_saves_wherever_the_path_leads(bucket: Bucket, caller: str, tmp_path: Any) -> None:
    with build_checkpointer("sync" if caller == "inline" else "async_persistent") as checkpointer:
        for path in (f"{bucket.url}/one", str(tmp_path / "two"), f"{bucket.url}/three"):
            checkpointer.save(state(1), path)
        checkpointer.wait()
    assert {key.split("/")[0] for key in bucket.keys("")} == {"one", "three"} and (tmp_path / "two").is_dir()


def test_events_are_in_the_bucket(bucket: Bucket) -> None:
    for first in (1, 3):
        with build_manager("sync", [*settings(bucket), "checkpoint.resume=never", "checkpoint.rewind=true"]) as manager:
            manager.maybe_save(first, state(first))
            manager.maybe_save(first + 1, state(first + 1))
    saves = [event["step"] for event in read_events(f"{bucket.url}/runs/one") if event["event"] == "save"]
    assert saves == [1, 2, 3, 4]


def test_a_missing_bucket_is_an_error_at_once(bucket: Bucket) -> None:
    with pytest.raises(CheckpointConfigError, match="NoSuchBucket"):
        build_manager("sync", ["checkpoint.dir=s3://no-such-bucket-here/x"])


def test_two_ranks(bucket: Bucket, tmp_path: Path) -> None:
    done = run_ranks(Path(__file__).with_name("two_ranks.py"), "save_and_restore", 2, tmp_path, BUCKET=bucket.url)
    assert [text.split()[-3:] for text in done] == [["2", "2.0", "2"], ["2", "2.0", "3"]]
    assert {key.split("/")[1] for key in bucket.keys("run") if "/iter" in key} == {"iter_0000002"}


def test_the_example_job_saves_to_a_bucket_and_resumes(bucket: Bucket, tmp_path: Path) -> None:
    small = ("model=gpt_nano", "model.context=16", "train.batch_size=2", "train.eval_every=null")
    command = ["-m", "ckpt_component.train", "+recipe=cpu_quick", *small, f"checkpoint.dir={bucket.url}/gpt"]
    for steps, line in ((4, "starting from scratch"), (6, "restored step 4")):
        done = run_program([*command, f"train.steps={steps}"], tmp_path)
        assert done.returncode == 0 and line in done.stdout, done.stdout
    assert any(key.startswith("gpt/iter_0000006/") for key in bucket.keys("gpt"))
