"""Copies to peers and loads of several hosts: measured, read, judged, drawn; with a tiny state."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.hosts.host_page import hosts_shown
from ckpt_bench.hosts.host_rows import COPIES, reads

pytestmark = pytest.mark.slow


@pytest.mark.turns(3)
def test_copies_and_loads_of_hosts_are_measured_and_shown_again(
    bench: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = bench("hosts", "hosts=2")
    # So few bytes tell nothing of a promise, which may fail.
    assert "several hosts; medians, in seconds" in done.stdout, done.stdout + done.stderr
    folder = tmp_path / "run" / "out"
    rows = json.loads((folder / "hosts.json").read_text())["rows"]
    assert [*rows] == [COPIES, "read once, 2 hosts"] and not any("error" in run for run in rows.values()), rows
    assert all(
        value > 0
        for run in rows.values()
        for each in run.values()
        for value in [*(each if isinstance(each, list) else [each])]
    )
    with open(folder / "hosts.csv", newline="") as file:
        assert {(each["row"], each["figure"]) for each in csv.DictReader(file)} > {(COPIES, "copy"), (COPIES, "stream")}
    again = bench("hosts", f"results={folder}", "hydra.run.dir=again")
    assert again.stdout.splitlines()[:4] == done.stdout.splitlines()[:4]


def verdicts(**rows: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict.promise.partition(",")[0]: verdict.holds for verdict in hosts_shown(rows).verdicts}


def test_what_is_promised_of_copies_and_of_loads_can_fail() -> None:
    figures = {"bytes": 9, "stream": [1.0, 1.0, 9.0], "first_copy": [3.0], "stream_cpu": [1.0], "copy_cpu": [1.0]}
    fast = {**figures, "copy": [1.2, 1.2, 30.0], "step_cpu_ratio": [1.04]}
    slow = {**figures, "copy": [1.3, 1.3, 9.0], "step_cpu_ratio": [1.06]}
    assert verdicts(copies=fast) == {"copies: speed": True, "copies: CPU of training steps": True}
    assert verdicts(copies=slow) == {"copies: speed": False, "copies: CPU of training steps": False}
    assert verdicts(copies={"error": "killed"}) == {"copies: speed": None, "copies: CPU of training steps": None}
    for load, holds in ((2.3, True), (2.5, False)):
        run = {"bytes": 9, "least": 2.0, "load": [load], "load_cpu": [1.0]}
        assert [each.holds for each in hosts_shown({reads(4): run}).verdicts] == [holds]
