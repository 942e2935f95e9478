"""Runs that publish, and receivers that follow them, killed at random times: each version that arrives is right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from ranks import finish_ranks, run_ranks, start_ranks
from snapshots import clients
from strides import STRIDE_OFFSET
from waiting import eventually

from ckpt_component.core.storage.files import FileStorage
from ckpt_component.publishing import follow
from ckpt_component.publishing.versions import Versions

SCRIPT = Path(__file__).parent / "scripts" / "published_run.py"
#: At least so many versions, whatever the time.
LEAST = 3


def publishing(trainer: int) -> list[psutil.Process]:
    """The processes of a trainer that make versions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(trainer).children(recursive=True)
        return [child for child in children if any("publish_process" in word for word in child.cmdline())]
    return []


def newest(folder: Path) -> int:
    return max(Versions(FileStorage(), str(folder / "weights")).look(), default=0)


def is_short(killed: dict[str, int], folder: Path) -> bool:
    """Whether one of them was never killed, or fewer versions were made than the least."""
    return not all(killed.values()) or newest(folder) < LEAST


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("versions", "seconds"),
    [
        pytest.param(10, 60, marks=[pytest.mark.slow, pytest.mark.turns(3)]),
        pytest.param(100, 1200, marks=pytest.mark.soak),
    ],
)
def test_kills_of_the_run_its_publishing_and_the_receiver(
    versions: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "sockets"))
    chance, killed = random.Random(STRIDE_OFFSET), dict.fromkeys(("trainer", "version", "receiver"), 0)
    (trainer,) = start_ranks(SCRIPT, "train", 1, tmp_path)
    (receiver,) = start_ranks(SCRIPT, "receive", 1, tmp_path)
    try:
        started = time.monotonic()
        eventually(lambda: newest(tmp_path), 120)
        # Kills come as far apart as a start takes here: on a machine that is slower, a trainer gets as far between them.
        start = time.monotonic() - started
        until, least = time.monotonic() + seconds, time.monotonic() + 10 * seconds
        while is_short(killed, tmp_path) or (newest(tmp_path) < versions and time.monotonic() < until):
            assert time.monotonic() < least, killed
            time.sleep(start * chance.uniform(0.05, 1.0))
            victim = chance.choice([*killed])
            if victim == "version":
                for process in publishing(trainer):
                    kill(process.pid)
                    killed[victim] += 1
                continue
            pid, name = (trainer, "train") if victim == "trainer" else (receiver, "receive")
            kill(pid)
            (ended,) = finish_ranks([pid])
            assert ended.code == -signal.SIGKILL, ended.output
            killed[victim] += 1
            (pid,) = start_ranks(SCRIPT, name, 1, tmp_path)
            trainer, receiver = (pid, receiver) if victim == "trainer" else (trainer, pid)
        (tmp_path / "stop").touch()
        for ended in finish_ranks([trainer, receiver], 180):
            assert ended.code == 0, ended.output
    finally:
        for pid in (trainer, receiver):
            kill(pid)
    assert not is_short(killed, tmp_path), killed
    received = [int(line) for line in (tmp_path / "received").read_text().split()]
    assert received == sorted(received) and received[-1] == newest(tmp_path)
    assert not [name for name in os.listdir(tmp_path / "weights") if name.startswith((".ckpt-tmp", ".ckpt-trash"))]
    eventually(lambda: not clients(), 60)


@pytest.mark.slow
def test_a_sharded_model_is_one_version_of_whole_tensors(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "sharded", 2, tmp_path)
    expected, versions = torch.load(tmp_path / "expected.pt"), follow(tmp_path / "weights", timeout=20)
    weights = next(versions)
    there = dict(weights.tensors())
    assert weights.step == 2 and there.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in there.items())
    there.clear()
    versions.close()
