"""Costs at growing sizes: measured, read, judged, drawn; with tiny sizes."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.growth.cost_page import costs_shown
from ckpt_bench.growth.cost_table import render_growth
from ckpt_bench.growth.costs import COSTS, Course, errors, points, read_growth, write_growth
from ckpt_bench.growth.counted_connection import CountedConnection, Counts
from ckpt_bench.growth.courses import measure_courses
from ckpt_bench.growth.item_costs import make_items, measure_items
from ckpt_bench.growth.judge import judge_growth
from ckpt_bench.growth.peer_costs import measure_hosts
from ckpt_bench.growth.rank_costs import measure_ranks
from ckpt_bench.schema import Bench, BenchRequest
from torch.distributed import HashStore

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError
from ckpt_component.state.flatten import flatten

pytestmark = pytest.mark.slow

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def course(cost: str, by_size: dict[int, list[float]], axis: str = "items") -> Course:
    return Course(axis, {size: [{cost: value} for value in values] for size, values in by_size.items()})


def verdict_of(one: Course, cost: str) -> Any:
    return next(verdict for verdict in judge_growth([one]) if verdict.promise.startswith(f"{cost}:"))


def test_items_have_all_their_costs_and_leave_nothing(tmp_path: Path) -> None:
    found = {name: value for part in measure_items(200, 1, str(tmp_path)) for name, value in part.items()}
    assert set(found) == set(COSTS["items"]) and all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []
    flat = flatten(make_items(5000))
    assert len(flat.tensors) == 5000 and len({tensor.shape for tensor in flat.tensors}) == 4096
    assert len(set(flat.tensor_paths)) == 5000 and flat.objects == [1]


@pytest.mark.turns(3)
def test_ranks_have_all_their_costs_and_catalogs_are_told_once(tmp_path: Path) -> None:
    [found] = measure_ranks(3, 1, str(tmp_path))
    assert set(COSTS["ranks"]) <= set(found) and all(value > 0 for value in found.values())
    # Plan and catalogs are told at the first save alone.
    assert found["collected_bytes"] < found["first_collected_bytes"]
    assert found["messages"] < found["first_messages"] + 3 * 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.turns(3)
def test_hosts_have_all_their_costs_and_copies_cost_each_rank_as_much_on_many_hosts(tmp_path: Path) -> None:
    few, many = (next(measure_hosts(count, 2, str(tmp_path))) for count in (3, 12))
    assert set(COSTS["hosts"]) == set(few) and all(value > 0 for value in few.values())
    for cost in ("messages", "begin_messages", "restore_messages"):
        assert many[cost] / 12 <= few[cost] / 3 * 1.05, cost


def test_what_goes_over_a_connection_is_counted() -> None:
    one = CountedConnection(HashStore())
    one.set("a", b"12345")
    one.set("beat/0", b"not counted")
    assert one.add("n", 2) == 2 and one.add("n", 0) == 2
    assert one.check(["a"]) and one.get("a") == b"12345" and one.multi_get(["a", "a"]) == [b"12345"] * 2
    assert one.delete_key("a") and not one.check(["a"]) and one.clone() is one
    assert one.counts() == Counts(messages=3, looks=5, bytes_read=15)
    assert one.counts() - Counts(1, 2, 3) == Counts(2, 3, 12) and Counts(1, 1, 1) + Counts(1, 2, 3) == Counts(2, 3, 4)


def test_a_cost_for_one_and_its_growth_from_size_to_size() -> None:
    one = course("stall", {10: [1.0, 3.0], 30: [2.0, 4.0], 100: []})
    first, second = points(one, "stall")
    assert (first.median, first.low, first.high, first.each, first.ratio) == (2.0, 1.0, 3.0, 0.2, None)
    assert second.each == 0.1 and second.ratio == pytest.approx(2 / 3)
    assert points(one, "load") == []


@pytest.mark.parametrize(
    ("by_size", "holds"),
    [
        ({1000: 0.1, 10_000: 1.0, 100_000: 10.0}, True),
        ({1000: 0.1, 10_000: 1.2, 100_000: 15.0}, True),  # n log n
        ({1000: 0.1, 10_000: 1.0, 100_000: 30.0}, False),  # the square begins to show
        ({1000: 0.1, 10_000: 10.0, 100_000: 1000.0}, False),
        ({1000: 0.1, 10_000: 0.0001, 100_000: 1000.0}, None),  # nothing to compare with
        ({50_000: 0.1, 100_000: 10.0}, None),
    ],
)
def test_what_grows_faster_than_linearly_fails(by_size: dict[int, float], holds: bool | None) -> None:
    one = course("stall", {size: [value * 1.5, value] for size, value in by_size.items()})
    assert verdict_of(one, "stall").holds is holds
    assert verdict_of(one, "load").holds is None, "it was not measured"


def test_counts_are_held_to_less() -> None:
    for value, holds in ((100_000.0, True), (200_000.0, False)):
        one = course("metadata_bytes", {100: [1000.0], 10_000: [value]})
        assert verdict_of(one, "metadata_bytes").holds is holds


def test_costs_are_kept_and_read_back(tmp_path: Path) -> None:
    one = Course("ranks", {1: [{"leader_cpu": 1.0}], 10: [{"leader_cpu": 5.0}, {"error": "it broke"}]})
    write_growth([one], tmp_path, {"cores": 2})
    assert read_growth(str(tmp_path)) == ([one], {"cores": 2})
    with open(tmp_path / "growth.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["ratio"] == "" and (second["size"], second["each"], second["ratio"]) == ("10", "0.5", "0.5")
    assert list(errors(one)) == ["10 ranks: FAILED in 1 of 2: it broke"]
    text = render_growth(one)
    assert "500.00 ms  0.50" in text and "it broke" in text
    (tmp_path / "growth.json").write_text("[]")
    with pytest.raises(CheckpointConfigError, match="no growth can be read"):
        read_growth(str(tmp_path))


def test_a_size_that_breaks_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    kept: list[int] = []

    def say(line: str) -> None:
        said.append(line)
        if (tmp_path / "growth.json").exists():
            kept.append(sum(map(len, read_growth(str(tmp_path))[0][0].runs.values())))

    # Nothing can be measured within no time.
    bench = Bench(repeats=1, saves=1, row_timeout=0.01)
    request = BenchRequest(bench, [], [], [], {"items": [10, 20], "ranks": []})
    [one] = measure_courses(request, (tmp_path, "dir"), {}, tmp_path, say)
    assert [runs for runs in one.runs.values()] == [[{"error": "killed: not done after 0.01 s (row_timeout)"}]] * 2
    assert said.count("repeat 1 of 1: 20 items") == 1 and any("FAILED" in line for line in said)
    assert kept == [1, 1, 2], "what there is is written after each process"


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    one = course("stall", {10: [1.0], 100: [2.0]})
    one.runs[1000] = [{"error": "<b>"}]
    assert [path.name for path in costs_shown([one]).write_page({}, tmp_path)] == ["growth.png", "growth.html"]
    page = (tmp_path / "growth.html").read_text()
    assert "data:image/png;base64," in page and not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert costs_shown([Course("items", {})]).write_page({}, tmp_path / "none") == []


@pytest.mark.soak
def test_the_command_measures_shows_and_judges(bench: Command, tmp_path: Path) -> None:
    done = bench("growth", "items=10,20", "ranks=1", "hosts=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "costs for each item" in done.stdout and "costs for each rank" in done.stdout and " 0 FAIL" in done.stdout
    folder = tmp_path / "run" / "out"
    content = json.loads((folder / "growth.json").read_text())
    assert [list(each["runs"]) for each in content["courses"]] == [["10", "20"], ["1"], ["2"]]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"out"}
    again = bench("growth", "results=out", "hydra.run.dir=again")
    assert again.returncode == 0 and "repeat 1 of 1" not in again.stderr and "costs for each item" in again.stdout


@pytest.mark.turns(3)
@pytest.mark.parametrize("override", ["items=0", "ranks=many", "items=[1,2.5]"])
def test_a_size_that_is_none_ends_in_words(bench: Command, override: str) -> None:
    done = bench("growth", override)
    assert done.returncode == 1 and "is no size; use whole numbers from 1" in done.stderr
