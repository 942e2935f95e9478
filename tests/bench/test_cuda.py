"""The same measurements on a CUDA device; and what is said where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_bench.measure.limits import measure_limits
from ckpt_bench.measure.memory import device_peak
from ckpt_bench.measure.row import RowSettings, measure_row
from ckpt_bench.measure.states import make_state
from ckpt_bench.peer_environment import PeerEnvironment
from ckpt_bench.promises import judge
from ckpt_bench.runs import Case, Runner
from ckpt_bench.time_budget import TimeBudget

Bench = Callable[..., "subprocess.CompletedProcess[str]"]

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_in_a_sentence(bench: Bench) -> None:
    done = bench("device=cuda")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "device=cuda: torch sees no CUDA device here; use device=cpu" in done.stderr


def test_peers_are_not_measured_on_a_device(tmp_path: Path) -> None:
    said: list[str] = []
    runner = Runner(
        peers=PeerEnvironment(str(tmp_path / "peers")),
        settings={"device": "cuda", "enough_seconds": 1.0},
        repeats=1,
        timeout=0.01,
        logs=tmp_path,
        say=said.append,
    )
    case = Case("tiny", "disk")
    runner.measure(case, ["sync", "safetensors"], str(tmp_path), lambda row, run: None, TimeBudget(None))
    assert "only rows of ours and of torch" in case.rows["safetensors"][0]["absent"]
    assert "killed" in case.rows["sync"][0]["error"]


def test_on_a_device_staging_is_held_to_the_copy_into_page_locked_memory() -> None:
    for staged, holds in ((0.1, True), (0.2, False)):
        rows = {"limits": [{"d2h": 0.1, "memcpy": 1.0}], "async_pinned": [{"staged": staged}]}
        [verdict] = [
            each
            for each in judge([Case("large", "disk", rows)], cores=2, loop_threads=1)
            if each.promise.startswith("staging by async_pinned, large on disk")
        ]
        assert verdict.holds is holds
    without = judge([Case("large", "disk", {"limits": [{"memcpy": 1.0}]})], cores=2, loop_threads=1)
    assert not any(each.promise.startswith("staging by") for each in without)


def test_the_cpu_has_no_device_memory() -> None:
    with device_peak("cpu") as peak:
        torch.ones(1000)
    assert peak.nbytes == 0


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", ["async_pinned", "async_zero_overhead", "torch_save"])
def test_a_row_is_measured_on_the_device(name: str, tmp_path: Path) -> None:
    state = make_state("tiny", device="cuda")
    settings = RowSettings(1, 1.0, 1, 0.001, 0.0, 1, cold=False, device="cuda")
    found = {key: value for part in measure_row(name, state, str(tmp_path), settings) for key, value in part.items()}
    assert all(tensor.is_cuda for tensor in state.values())
    assert found["torn"] == 0 and found["next_steps"] > 0 and found["device_memory"] >= 0


@pytest.mark.gpu
@on_cuda
def test_the_limits_of_the_device_are_measured(tmp_path: Path) -> None:
    [found] = measure_limits(make_state("tiny", device="cuda"), str(tmp_path), turns=[0], cold=False)
    assert found["d2h"] > 0 and found["d2h_foreach"] > 0 and "fork" not in found
