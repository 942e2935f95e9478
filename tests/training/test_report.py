from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from ckpt_train.report import Summary, time_fence

from ckpt_component.cli.output import duration
from ckpt_component.cli.reports.result import write_result
from ckpt_component.events.reports import SaveReport

GOOD = SaveReport(
    path="/c/iter_0000020",
    step=20,
    bytes=2_000_000_000,
    files=5,
    stall_s=0.0125,
    staged_s=0.012,
    written_s=1.5,
    committed_s=1.52,
    write_s=1.0,
)
BAD = SaveReport(path="/c/iter_0000040", step=40, outcome="failed", error="the disk is full")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00 ms"), (0.00052, "0.52 ms"), (0.0432, "43 ms"), (1.2349, "1.23 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_are_plain_data() -> None:
    summary = Summary(step=40, step_s=0.35, fence_s=0.0875, losses=[(40, 2.5)], reports=[GOOD, BAD])
    figures = summary.figures()
    assert figures["saves"] == 1 and figures["loss"] == 2.5 and figures["validation_loss"] is None
    assert json.loads(json.dumps(figures)) == figures
    # What a sweep compares: one save is the first, and there is no later one. 12.5 ms in the call, 87.5 ms in the fence.
    assert figures["first_stall_s"] == pytest.approx(0.1) and figures["stall_s"] is None
    assert figures["durable_s"] == 1.52 and figures["gbps"] == pytest.approx(2 / 1.52)
    two = Summary(fence_s=1.0, reports=[GOOD, GOOD]).figures()
    assert two["stall_s"] == pytest.approx(0.5125)


def test_a_run_without_saves_has_figures_too() -> None:
    assert Summary().figures()["saves"] == 0
    assert Summary(stopped_by=signal.SIGTERM).figures()["gbps"] is None


def test_the_fence_is_timed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ckpt_train.report.time.perf_counter", lambda: now[0])
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def tick(*_: object) -> None:
        now[0] += 2.0

    optimizer.register_step_pre_hook(tick)  # not the guard's: before

    def guard(guarded: torch.optim.Optimizer) -> None:
        guarded.register_step_pre_hook(tick)

    clock = time_fence(optimizer, guard)
    optimizer.register_step_pre_hook(tick)  # not the guard's: after
    optimizer.step()
    optimizer.step()
    assert clock.seconds == 4.0


def test_the_result_file_is_whole(tmp_path: Path) -> None:
    write_result(str(tmp_path), "skipped", overrides=["a=1"], choices={"checkpoint": "sync"}, reason="does not fit")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "skipped",
        "reason": "does not fit",
        "overrides": ["a=1"],
        "choices": {"checkpoint": "sync"},
        "figures": {},
        "rows": [],
    }
