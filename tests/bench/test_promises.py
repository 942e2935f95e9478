"""The arithmetic of figures and promises, on figures made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.measure.row_kinds import ROWS, rows_of
from ckpt_bench.promises import judge
from ckpt_bench.row_figures import read_figures, spread, why_not, write_figures
from ckpt_bench.row_table import render
from ckpt_bench.runs import Case
from ckpt_bench.verdicts import Verdict

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

GB = 1_500_000_000
OURS: dict[str, Any] = {
    "first_stall": 0.2,
    "stall": 0.11,
    "staged": 0.11,
    "complete": 1.05,
    "durable": 1.05,
    "background": 0.94,
    "lost": 0.2,
    "step_ratio": 1.01,
    "memory": int(1.05 * GB),
    "bytes": GB,
    "files": 5,
    "load_warm": 0.2,
    "load_cold": 1.0,
    "torn": 0,
    "state_bytes": GB,
    "arenas": 1,
    "checksum": "crc32",
    "checksum_by": "zlib",
    "raw_copy": 0.1,
    "raw_write_2": 0.9,
    "raw_direct_2": 0.8,
    "raw_read_warm": 0.18,
    "raw_read_cold": 0.9,
}
LIMITS = {"memcpy": 0.1, "direct_1": 0.8}
PEER = OURS | {"stall": 0.03, "lost": 0.9, "durable": 1.4, "complete": 1.2, "load_warm": 1.0}


def case(state: str = "large", target: str = "disk", **rows: Any) -> Case:
    """Our rows and dcp.save with good figures, changed by `rows`."""
    found = {name: OURS for name in rows_of("ours")}
    found["async_persistent_fast"] = OURS | {
        "checksum_by": "isal",
        "durable": 0.88,
        "background": 0.84,
        "raw_read_warm": 0.17,
    }
    found["async_zero_overhead_fast"] = OURS | {"checksum_by": "isal", "durable": 0.85, "background": 0.85}
    found["async_zero_overhead"] = OURS | {"stall": 0.01, "arenas": 2, "memory": 2 * GB}
    found |= {"torch_save": PEER, "dcp_save_t1": PEER | {"durable": 30.0, "load_warm": 20.0}, "dcp_save_t2": PEER}
    found |= rows
    return Case(state, target, {"limits": [LIMITS], **{name: [run] for name, run in found.items()}})


def verdict(cases: list[Case], words: str, **more: int) -> Verdict:
    [found] = [one for one in judge(cases, **({"cores": 2, "loop_threads": 1} | more)) if words in one.promise]
    return found


def test_medians_have_their_range_and_leave_out_what_failed() -> None:
    runs: list[dict[str, Any]] = [
        {"durable": 3.0},
        {"durable": 1.0},
        {"error": "it broke"},
        {"durable": 2.0},
        {"durable": 9.0},
    ]
    one = Case("large", "disk", {"sync": runs})
    found = spread(one, "sync", "durable")
    assert found is not None
    assert (found.median, found.low, found.high, found.repeats) == (2.5, 1.0, 9.0, 4)
    assert spread(one, "sync", "load_cold") is None
    assert why_not(one, "sync") == "FAILED in 1 of 5: it broke"


def test_good_figures_hold_and_bad_ones_fail() -> None:
    good = judge([case()], cores=2, loop_threads=1)
    assert not [one.line() for one in good if one.holds is False]
    bad: Any = OURS | {
        "staged": 0.13,
        "durable": 2.0,
        "lost": 0.5,
        "memory": 4 * GB,
        "load_warm": 0.6,
        "load_cold": 2.0,
    }
    bad |= {"step_ratio": 1.1, "stall": 0.04}
    worse = judge([case(**{name: bad for name in rows_of("ours")})], cores=2, loop_threads=1)
    measured = [one for one in worse if one.measured is not None]
    assert [one.promise for one in measured if one.holds] == ["torn tensors in snapshots of ours, large on disk, none"]
    # Lost time of two rows, three stalls, two of the durable saves (the fast checksums' are not there), three loads, and memory and
    # steps of five rows.
    assert sum(one.holds is False for one in measured) == 2 + 3 + 2 + 3 + 2 * 5
    assert all(one.line().startswith("FAIL") for one in measured if not one.holds)
    torn = verdict([case(async_temporal=OURS | {"torn": 2})], "torn tensors")
    assert torn.measured == 2 and torn.holds is False


def test_ratios_are_those_of_the_best_that_may_be_compared() -> None:
    torn = PEER | {"lost": 0.1, "torn": 3}
    lost = verdict([case(nvrx_persistent=torn)], "training time lost, async_persistent,")
    # A peer that loses less and whose snapshot is torn does not count.
    assert lost.measured == pytest.approx(0.2 / 0.9) and lost.holds
    raw = verdict([case()], "large on disk: the best raw write over ours, crc32")
    assert raw.measured == pytest.approx(0.8 / 1.05) and "raw_direct_2 beside async_persistent over" in raw.note
    # The faster of the two dcp.save, and never a peer that leaves the syncing to us.
    fsyncs = verdict([case(safetensors=PEER | {"durable": 0.1})], "large on disk: the fastest peer that fsyncs")
    assert fsyncs.measured == pytest.approx(1.4 / 1.05) and not ROWS["safetensors"].fsyncs
    # The fork-based peers count for the stall.
    stalls = [
        one
        for one in judge([case(nvrx_torch_temporal=PEER | {"stall": 0.005})], cores=2, loop_threads=1)
        if "large on disk, over the least" in one.promise
    ]
    assert [one.measured for one in stalls] == [pytest.approx(2.0)] and stalls[0].holds is False


def test_the_bound_goes_with_the_checksum() -> None:
    stock: dict[str, Any] = {name: PEER | {"durable": 16.8} for name in ("dcp_save_t1", "dcp_save_t2")}
    small = [case("many_small", **stock)]
    slow, fast = (
        verdict(small, f"many_small on disk: dcp.save over ours, {name}") for name in ("crc32", "async_persistent_fast")
    )
    assert slow.measured == pytest.approx(16.0) and slow.holds
    assert fast.measured == pytest.approx(16.8 / 0.88) and fast.holds is False
    for row, seconds in (("async_persistent_fast", 0.88), ("async_zero_overhead_fast", 0.85)):
        whole = verdict([case()], f"durable save, large on disk: the best raw write over ours, {row}")
        assert whole.measured == pytest.approx(0.8 / seconds) and whole.holds is None
    for row, seconds in (("async_persistent_fast", 0.84), ("async_zero_overhead_fast", 0.85)):
        beside = verdict([case()], f"background save, large on disk: the best raw write over ours, {row}")
        assert beside.measured == pytest.approx(0.8 / seconds) and beside.holds
    # Loads are held to a read in turn with them.
    load = verdict([case()], "large on disk, warm: reading the bytes with their checksum over async_persistent_fast")
    assert load.measured == pytest.approx(0.17 / 0.2) and "raw_read_warm beside async_persistent_fast" in load.note
    without = verdict(
        [case(async_persistent_fast=OURS)],
        "background save, large on disk: the best raw write over ours, async_persistent_fast",
    )
    assert without.holds is None and "pip install isal" in without.note
    # On tmpfs nothing is promised of zlib's; the ratio is only reported.
    ratio = verdict([case(target="tmpfs")], "large on tmpfs: the best raw write over ours, crc32")
    assert ratio.holds is None and ratio.measured == pytest.approx(0.8 / 1.05) and ratio.line().startswith("reported")


def test_what_cannot_be_measured_says_why_and_does_not_fail() -> None:
    missing = case()
    missing.rows["async_pinned"] = [{"error": "it broke"}]
    found = verdict([missing], "changed, async_pinned, large on disk")
    assert found.holds is None and "it broke" in found.note and found.line().startswith("not measured")
    assert "is not in this run" in verdict([case()], "many_small on disk: torch.save").note
    busy = verdict([case()], "step time while async_persistent writes", loop_threads=2)
    assert busy.holds is None and "no core is free" in busy.note
    quick = verdict([case(async_persistent=OURS | {"step_ratio": None})], "step time while async_persistent writes")
    assert "within three steps" in quick.note
    nothing = verdict([case(torch_save=PEER | {"lost": -0.01})], "training time lost, async_persistent,")
    assert nothing.holds is None and "no ratio" in nothing.note


def test_figures_are_kept_and_read_back(tmp_path: Path) -> None:
    one = case()
    one.rows["safetensors"] = [{"absent": "it is not there"}]
    write_figures([one], tmp_path, {"cores": 2})
    assert read_figures(str(tmp_path)) == ([one], {"cores": 2})
    assert "it is not there" in (tmp_path / "figures.csv").read_text()
    (tmp_path / "figures.json").write_text("{")
    with pytest.raises(CheckpointConfigError, match="no figures can be read"):
        read_figures(str(tmp_path))


def test_the_table_has_every_row_or_its_reason() -> None:
    one = case(sync=OURS | {"torn": 4})
    one.rows["safetensors"] = [{"absent": "it is not there"}]
    one.rows["dcp_save_t1"] = [{"error": "it broke"}]
    one.rows["torch_save"].append(PEER | {"durable": 2.4})
    text = render(one)
    lines = text.splitlines()
    assert "large on disk, 1.50 GB" in lines[1]
    assert "safetensors: not measured: it is not there" in lines and "dcp_save_t1: FAILED in 1 of 1: it broke" in lines
    assert next(line for line in lines if line.startswith("sync ")).endswith("NO (4 torn)")
    assert "1.90 (1.40..2.40)" in next(line for line in lines if line.startswith("torch_save "))
    assert any(line.startswith("limit memcpy") and "15.00 GB/s" in line for line in lines)
