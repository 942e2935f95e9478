"""Versions of weights, training beside them, and receivers: measured, read, judged, drawn; with a tiny state."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.publishing.changing_weights import CHANGED, ChangingWeights
from ckpt_bench.publishing.publish_page import publishing_shown
from ckpt_bench.publishing.row_calls import PULLS, TRAINING, VERSIONS

pytestmark = [pytest.mark.slow, pytest.mark.turns(3)]


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        (VERSIONS, ("delta_bytes", "publish", "export", "floor", "encode_cpu")),
        (TRAINING, ("quiet", "kept", "published", "published_versions")),
        (PULLS, ("pull_whole", "pull_delta", "follow_delta", "lag")),
    ],
)
def test_what_publishing_costs_is_measured_and_shown_again(
    bench: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, row: str, figures: tuple[str, ...]
) -> None:
    done = bench("publish", f"rows={row}")
    # So few bytes tell nothing of a promise, which may fail.
    assert "medians, in seconds" in done.stdout, done.stdout + done.stderr
    assert "Nothing was measured" not in done.stderr
    folder = tmp_path / "run" / "out"
    rows = json.loads((folder / "publish.json").read_text())["rows"]
    assert [*rows] == [row] and "error" not in rows[row], rows
    assert all(rows[row][figure] and min(rows[row][figure]) > 0 for figure in figures), rows
    if row == VERSIONS:
        assert max(rows[row]["delta_bytes"]) < rows[row]["whole_bytes"]
    with open(folder / "publish.csv", newline="") as file:
        assert {(each["row"], each["figure"]) for each in csv.DictReader(file)} >= {(row, each) for each in figures}
    again = bench("publish", f"results={folder}", "hydra.run.dir=again")
    assert again.stdout.splitlines()[:9] == done.stdout.splitlines()[:9]


def test_a_step_changes_so_many_elements_of_each_weight() -> None:
    weights = ChangingWeights("bf16_mixed")
    rest = [tensor.clone() for tensor in weights.content["optimizer"].values()]
    for _ in range(2):
        before = [tensor.clone() for tensor in weights.tensors]
        weights.step()
        for old, tensor in zip(before, weights.tensors, strict=True):
            changed = int(old.ne(tensor).sum())
            assert changed == pytest.approx(CHANGED * tensor.numel(), rel=0.1, abs=10)
    assert all(
        map(bool, (one.equal(other) for one, other in zip(rest, weights.content["optimizer"].values(), strict=True)))
    )


def holding(**rows: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict.promise: verdict.holds for verdict in publishing_shown(rows).verdicts}


def test_what_is_promised_of_versions_can_fail() -> None:
    figures = {"bytes": 10**9, "whole_bytes": 1000, "encode_cpu": [1.25, 1.25, 9.0], "export": [1.0, 1.0, 9.0]}
    size, export, floor = (
        "versions: bytes (aim 0.025), at most 0.04",
        "versions: seconds, at most 0.1",
        "versions: seconds, at most 1.5",
    )
    fast = {**figures, "delta_bytes": [40], "publish": [0.1, 0.09, 9.0], "floor": [0.05, 0.05, 1.0]}
    assert holding(versions=fast).items() >= {size: True, export: True, "versions: seconds": None}.items()
    slow = {**figures, "delta_bytes": [41], "publish": [0.2, 0.2, 0.1], "floor": [0.05, 0.05, 1.0]}
    assert holding(versions=slow).items() >= {size: False, export: False}.items()
    # Where the parts alone take longer than a tenth of an export, they are what it is held to.
    for seconds, holds in ((0.3, True), (0.31, False)):
        run = {**fast, "publish": [seconds] * 3, "floor": [0.2] * 3}
        assert holding(versions=run).items() >= {floor: holds, "versions: seconds": None}.items()
    (rate,) = (each for each in publishing_shown({"versions": fast}).verdicts if "GB/s" in each.promise)
    assert rate.measured == 0.8
    assert not any(holding(versions={"error": "killed"}).values())


def test_what_is_promised_of_training_can_fail() -> None:
    quiet = {"quiet": [1.0], "quiet_cpu": [1.0], "quiet_queue": [0.0]}
    kept = {"kept": [1.1], "kept_cpu": [1.0], "kept_queue": [0.0], "kept_stall": [0.1]}
    for seconds, holds in ((1.2, True), (1.25, False)):
        published = {"published": [seconds], "published_cpu": [1.0], "published_queue": [0.0], "published_stall": [0.1]}
        found = holding(training={**quiet, **kept, **published})
        assert found["training: a step with snapshots, at most 1.1"] is holds
