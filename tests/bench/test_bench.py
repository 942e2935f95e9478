"""The benchmark runs, computes its ratios from its own run, and reports a row that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_component.bench.__main__ import main
from ckpt_component.bench.table import claims, render


def test_a_tiny_run_prints_a_table_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "figures.json"
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = ["async_persistent", "torch.save"]
    assert main(["--state", "tiny", "--repeats", "1", "--dir", str(disk), "--json", str(report), "--rows", *rows]) == 0
    figures = json.loads(report.read_text())["tiny"]
    assert set(figures["rows"]) == set(rows)
    assert all(run["durable"] > 0 for runs in figures["rows"].values() for run in runs)
    assert figures["limits"]["memcpy"] > 0
    assert "async_persistent" in capsys.readouterr().out
    assert list(disk.iterdir()) == []


def test_claims_are_ratios_of_the_same_run_and_can_fail() -> None:
    limits = {"foreach_copy": 0.1, "memcpy": 0.1}
    fast = {"stall": 0.15, "durable": 0.5}
    slow = {"stall": 0.25, "durable": 2.0}
    stock = [{"durable": 8.0}]
    good = claims("many_small", {"async_persistent": [fast], "dcp.save t1": stock}, limits)
    bad = claims("many_small", {"async_persistent": [slow], "dcp.save t1": stock}, limits)
    assert [line.split(":")[0] for line in good] == ["holds", "holds"]
    assert [line.split(":")[0] for line in bad] == ["DOES NOT HOLD", "DOES NOT HOLD"]
    assert "16.00" in good[0] and "1.50" in good[1]


def test_a_row_that_fails_is_reported() -> None:
    text = render("tiny", 1000, {"dcp.save t1": [{"error": "it broke"}]}, {"memcpy": 0.1})
    assert "FAILED: it broke" in text
