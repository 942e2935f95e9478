"""`ckpt tune` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ckpt_bench.tuning.command import run_tune

import ckpt_component
from ckpt_component.cli.app import parse
from ckpt_component.cli.output import Output
from ckpt_component.config import compose_checkpoint
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(ckpt_component.__file__).parents[1])}
TUNE = [sys.executable, "-m", "ckpt_component.cli", "tune", "target", "--state", "tiny"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.soak
def test_it_measures_says_why_and_writes_a_recipe_that_works(target: Path) -> None:
    fixed = ("checkpoint/writer=torch_save", "checkpoint.writer.workers=1", "checkpoint/stager=pinned")
    options = [f"--override={word}" for word in (*fixed, "checkpoint.writer.io=buffered")]
    done = subprocess.run(
        [*TUNE, "--seconds=60", "--repeats=2", "--name=mine", *options],
        cwd=target.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(target.iterdir()) == []
    assert "checkpoint.writer.block_bytes: bytes a write call, by durable" in done.stdout
    assert "-> checkpoint.writer.block_bytes=" in done.stdout and "checkpoint.writer.workers: " not in done.stdout
    assert "ckpt-train --config-dir tuned +recipe=mine" in done.stdout
    overrides = [f"hydra.searchpath=[file://{target.parent / 'tuned'}]", "+recipe=mine"]
    config = compose_checkpoint("async_persistent", overrides)
    assert config.writer.workers == 1 and config.writer.io == "buffered"
    assert config.stager._target_.endswith("PinnedStager")
    options = ["--json", "--seconds=60", "--repeats=2", "--override=checkpoint.writer.workers=1", *options[:1]]
    plain = subprocess.run(
        [*TUNE, *options, "--override=checkpoint.writer.io=buffered", "--override=checkpoint/stager=pinned"],
        cwd=target.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    result = json.loads(plain.stdout)
    assert result["settings"]["checkpoint.writer.workers"] == "1" and "checkpoint.writer.block_bytes" in plain.stderr
    assert [answer["key"] for answer in result["answers"]] == ["checkpoint.writer.block_bytes"]
    # The same again would write over it, and measures nothing.
    again = subprocess.run(
        [*TUNE, "--name=mine"],
        cwd=target.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 2 and "exists; type another --name, or --replace" in again.stderr and not again.stdout


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_stopped_one_leaves_nothing(target: Path) -> None:
    with subprocess.Popen(
        [*TUNE, "--seconds=100000", "--repeats=1000000"], cwd=target.parent, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(target.glob("*/save*")):  # a save is being made
                assert time.monotonic() < deadline and process.poll() is None
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert started and not psutil.wait_procs(started, timeout=30)[1]
    assert list(target.iterdir()) == [] and not (target.parent / "tuned").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--size=big"],
            "--size must be a number of bytes, or one with a unit: 500MB (MB = 1e6), 8MiB (MiB = 2^20), 2GB; got big.",
        ),
        (["--size=10"], "--size=10 is too little to measure; type a unit, such as --size=4GB"),
        (["--size=1e6TB"], "type a smaller --size"),
        (["--repeats=1"], "--repeats=1 cannot be told from noise; type 2 or more"),
        (["--writers=dpc"], "There is no checkpoint/writer=dpc. Did you mean checkpoint/writer=dcp?"),
        (["--override=writer.workers=2"], "--override=writer.workers=2 must be like checkpoint.writer"),
        (["--override=checkpoint.writer.worker=2"], "Did you mean checkpoint.writer.workers=2?"),
        (["--name=../up"], "cannot be a recipe's name"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(target: Path, options: list[str], told: str) -> None:
    parsed = parse(["tune", str(target), *options, f"--conf={target / 'conf'}"])
    with pytest.raises(CheckpointConfigError) as caught:
        run_tune(parsed, Output())
    assert told in str(caught.value) and list(target.iterdir()) == []


def test_a_wrong_folder(target: Path) -> None:
    parsed = parse(["tune", str(target / "nowhere")])
    with pytest.raises(CheckpointConfigError, match="nowhere is not a folder; give the one where checkpoints will be"):
        run_tune(parsed, Output())
