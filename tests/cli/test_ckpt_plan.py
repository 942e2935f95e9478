"""`ckpt plan`: the formulas hold, and what was measured on one size predicts another."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.cli.app import main
from ckpt_component.cli.plan_command import plan
from ckpt_component.cli.plan_losses import failures_of
from ckpt_component.cli.plan_scenario import Scenario, best_interval, mtbf_of, training_fraction
from ckpt_component.config.schema import Recovery
from ckpt_component.core.options import RecoveryMode

MINUTE, HOUR = 60.0, 3600.0


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, *capsys.readouterr()


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = ckpt(capsys, *arguments, "--json")
    assert code == 0, err
    return {figure["name"]: figure["value"] for figure in json.loads(out)["figures"]}


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_interval_is_that_of_dalys_examples(mtbf_h: float, minutes: float) -> None:
    """The captions of figures 3 to 5 of his paper, with dumps of 5 minutes."""
    assert best_interval(5 * MINUTE, mtbf_h * HOUR) / MINUTE == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize(("lost", "mtbf"), [(0.1, 2 * HOUR), (30, 2 * HOUR), (300, HOUR)])
def test_no_other_interval_trains_more(lost: float, mtbf: float) -> None:
    at_best = training_fraction(best_interval(lost, mtbf), lost, mtbf, 120, 60)
    others = (training_fraction(best_interval(lost, mtbf) * 1.02**n, lost, mtbf, 120, 60) for n in range(-200, 200))
    assert 0 < at_best < 1 and at_best == pytest.approx(max(others), rel=1e-4)


def test_the_fraction_is_that_of_simulated_failures() -> None:
    interval, lost, mtbf, restart, durable = 300.0, 5.0, 1800.0, 120.0, 90.0
    numbers, trained, total = random.Random(7), 0.0, 0.0
    for _ in range(100_000):
        until_failure = numbers.expovariate(1 / mtbf)
        saves = max(until_failure - restart - durable, 0) // (interval + lost)
        trained, total = trained + saves * interval, total + until_failure
    assert training_fraction(interval, lost, mtbf, restart, durable) == pytest.approx(trained / total, rel=0.02)


def test_what_cannot_be_reached_is_zero_and_no_overflow() -> None:
    assert training_fraction(1e6, 1, 60, 300, 60) == 0
    assert mtbf_of(2048) / HOUR == pytest.approx(1.8, rel=0.01)  # as the paper projects for 16,384 GPUs


def test_figures_follow_from_the_state_and_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(capsys, "--state", "1.2TB", "--ranks", "1024", "--storage-gbps", "20", "--mtbf", "8h")
    assert got["state of a rank"] == pytest.approx(1.2e12 / 1024)
    assert got["host memory"] == pytest.approx(8 * (1.2e12 / 1024 + 15e6))
    assert got["durable"] == pytest.approx(60 + got["stall"]) and got["MTBF"] == 8 * HOUR
    twice = figures(capsys, "--state", "1.2TB", "--ranks", "1024", "--preset", "async_zero_overhead")
    assert twice["host memory"] == pytest.approx(8 * (2 * 1.2e12 / 1024 + 15e6)) and twice["durable"] is None
    waits = figures(capsys, "--state", "10GB", "--storage-gbps", "2", "--preset", "sync")
    assert waits["stall"] == waits["durable"] == waits["lost per save"] == pytest.approx(5)


def test_a_snapshot_that_stays_costs_images_and_saves_what_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--state", "80GB", "--ranks", "8", "--storage-gbps", "20", "--mtbf", "8h", "--recovery", "host")
    got, often = figures(capsys, *words), figures(capsys, *words, "--memory-every", "10s")
    assert got["memory of a rank"] == 2 * 10e9 and often["memory of a rank"] == 3 * 10e9
    assert got["host memory"] == pytest.approx(8 * (2 * 10e9 + 15e6))
    assert often["host memory"] == pytest.approx(8 * (3 * 10e9 + 15e6))
    half = (got["best interval"] or 0) / 2
    assert got["repeated, from disk"] == often["repeated, from disk"] == pytest.approx(half + got["durable"])
    assert got["repeated, from memory"] == pytest.approx(half + 1) and often["repeated, from memory"] == 6
    assert often["memory snapshots"] == pytest.approx(0.1) and "memory snapshots" not in got
    zero = figures(capsys, *words, "--preset", "async_zero_overhead", "--memory-every", "10s")
    assert zero["memory of a rank"] == 3 * 10e9  # its two arenas are those in flight
    several = " ".join(ckpt(capsys, *words, "--ranks-per-host", "4")[1].split())
    assert "needs all ranks on one host" in several and "So does every failure of a run on several hosts." in several
    without = figures(capsys, *words[:-2])
    assert not {"memory of a rank", "repeated, from memory"} & without.keys()
    assert {name: got[name] for name in without if name != "host memory"} == {
        name: value for name, value in without.items() if name != "host memory"
    }


def test_slow_storage_bounds_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ckpt(capsys, "--state", "1TB", "--ranks", "8", "--storage-gbps", "0.5", "--mtbf", "10h")
    assert code == 0 and "durable: saves do not overlap" in out and "checkpoint.save.every_seconds=2" in out
    code, out, _ = ckpt(capsys, "--state", "1TB", "--ranks", "8", "--storage-gbps", "50")
    assert "saves do not overlap" not in out and max(map(len, out.splitlines())) <= 100


class Machine:
    """Saves take a call of 5 ms, a copy at 8 GB/s, a write at 2 GB/s, and 20 ms to commit."""

    def __init__(self, preset: str = "async_persistent") -> None:
        self.preset = preset

    def save(self, nbytes: float) -> tuple[float, dict[str, list[float]]]:
        copied = 0.005 + (0 if self.preset == "sync" else nbytes / 8e9)
        written = copied + nbytes / 2e9
        spans = {"plan": [0.0, 0.005], "write": [copied, written], "commit": [written, written + 0.02]}
        if self.preset == "sync":
            return written + 0.02, spans
        return 0.005 if self.preset == "async_zero_overhead" else copied, {**spans, "stage": [0.005, copied]}

    def events(self, folder: Path, sizes: list[float], ranks: int = 1, reused: float | None = None) -> None:
        """Write the events of runs; `reused`: the part that saves did not write, None: as earlier releases recorded."""
        (folder / "events").mkdir()
        for rank in range(ranks):
            lines = list(self._events(sizes, rank, ranks, reused))
            text = "".join(f"{json.dumps({**line, 'rank': rank})}\n" for line in lines)
            (folder / "events" / f"rank-{rank:05d}.jsonl").write_text(text + '{"event": "sa')

    def _events(self, sizes: list[float], rank: int, ranks: int, reused: float | None) -> Iterator[dict[str, Any]]:
        for run, size in enumerate(sizes):
            about = {"host": "here", "world_size": ranks, "preset": self.preset}
            yield {"event": "run", "time": 1, "run": str(run), **about}
            for step in (1, 2, 3):
                stall, spans = self.save(size / ranks)
                slow = 5.0 if step == 1 else 0.0  # the first save allocates memory
                yield {
                    "event": "save",
                    "time": step,
                    "run": str(run),
                    "step": step,
                    "path": f"iter_{step}",
                    "outcome": "committed",
                    "attempts": 1,
                    "bytes": (1 - (reused or 0)) * size / ranks,
                    **({} if reused is None else {"reused": reused * size / ranks}),
                    "stall_s": stall + slow,
                    "lost_s": stall + slow,
                    "spans": {name: [begin + slow, end + slow] for name, (begin, end) in spans.items()},
                }
            failed = {"outcome": "failed", "path": "iter_4", "spans": {}, "bytes": 0}
            yield {"event": "save", "time": 4, "run": str(run), "step": 4, **failed}


@pytest.mark.parametrize("sizes", [[1e9], [1e9, 4e9]])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("preset", ["async_persistent", "async_zero_overhead", "sync"])
def test_a_measured_size_predicts_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sizes: list[float], ranks: int, preset: str
) -> None:
    machine = Machine(preset)
    machine.events(tmp_path, sizes, ranks)
    measured = ("--measured", str(tmp_path), "--preset", preset)
    got = figures(capsys, "--state", "20GB", "--ranks", str(ranks), *measured)
    stall, spans = machine.save(20e9 / ranks)
    assert got["stall"] == pytest.approx(stall, rel=1e-6)
    assert got["durable"] == pytest.approx(spans["commit"][1], rel=1e-6)
    # Ranks of a host share its path to the storage, and other hosts have their own.
    more = figures(capsys, "--state", "20GB", "--ranks", "16", "--ranks-per-host", "8", *measured)
    assert more["storage rate"] == pytest.approx(2 * ranks * 2e9)


def test_a_copy_that_slows_down_with_the_size_is_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line through two sizes meets both, though its intercept is below zero; a tiny state costs no less than 0."""
    machine = Machine()
    slower = {1e9: 0.1, 4e9: 0.6}
    spans = {"write": [0.7, 0.8], "commit": [0.8, 0.9]}
    monkeypatch.setattr(machine, "save", lambda size: (slower[size], {"stage": [0.0, slower[size]], **spans}))
    machine.events(tmp_path, [1e9, 4e9])
    for size, stall in (("1GB", 0.1), ("4GB", 0.6), ("7GB", 1.1), ("1MB", 0)):
        assert figures(capsys, "--state", size, "--measured", str(tmp_path))["stall"] == pytest.approx(stall)


def test_two_runs_are_better_than_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A write with a fixed part: one size takes it for a slow disk, two tell the parts apart. A short sync is fixed."""
    for name, size in (("a", 1e9), ("b", 4e9)):
        (tmp_path / name).mkdir()
        machine = Machine()
        spans = {"write": [0.0, 0.1 + size / 2e9], "sync": [0.1 + size / 2e9, 0.11 + size / 2e9]}
        machine.save = lambda _, spans=spans: (0.0, spans)  # type: ignore[method-assign, misc]
        machine.events(tmp_path / name, [size])
    one, other = (("--measured", str(tmp_path / name)) for name in "ab")
    assert figures(capsys, "--state", "8GB", *one)["durable"] == pytest.approx(8 * 0.6 + 0.01)
    assert figures(capsys, "--state", "8GB", *one, *other)["durable"] == pytest.approx(0.1 + 4 + 0.01)


def test_what_a_run_reused_is_not_planned_to_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, share in (("all", 1.0), ("part", 0.1)):
        (tmp_path / name).mkdir()
        machine = Machine()
        spans = {"stage": [0.0, 0.4], "write": [0.4, 0.4 + share * 2], "commit": [0.4 + share * 2, 0.42 + share * 2]}
        machine.save = lambda _, spans=spans: (0.4, spans)  # type: ignore[method-assign, misc]
        machine.events(tmp_path / name, [4e9], reused=1 - share)
    whole, part = (figures(capsys, "--state", "8GB", "--measured", str(tmp_path / name)) for name in ("all", "part"))
    assert [each["storage rate"] for each in (whole, part)] == pytest.approx([2e9, 2e9])
    assert [each["stall"] for each in (whole, part)] == pytest.approx([0.8, 0.8])
    assert "written per save" not in whole and part["written per save"] == pytest.approx(0.8e9)
    assert whole["durable"] == pytest.approx(0.82 + 4) and part["durable"] == pytest.approx(0.82 + 0.4)
    given = figures(capsys, "--state", "8GB", "--measured", str(tmp_path / "part"), "--storage-gbps", "1")
    assert given["durable"] == pytest.approx(0.82 + 0.8)
    assert given["storage rate needed"] == pytest.approx(0.8e9 / (given["best interval"] or 0))


def test_overlap_that_the_stager_gave_up_is_not_planned_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("async_persistent")
    stall, _ = machine.save(1e9)
    machine.preset = "async_zero_overhead"
    monkeypatch.setattr(machine, "save", Machine().save)
    machine.events(tmp_path, [1e9])
    measured = ("--state", "1GB", "--measured", str(tmp_path), "--preset", machine.preset)
    assert figures(capsys, *measured)["stall"] == pytest.approx(stall)
    assert "so they were awaited" in ckpt(capsys, *measured)[1]


def test_a_run_with_another_preset_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Machine("sync").events(tmp_path, [1e9])
    code, _, err = ckpt(capsys, "--state", "1GB", "--measured", str(tmp_path))
    assert code == 2 and "saved with sync; type --preset sync, or measure async_persistent." in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--state 1.2", "error: --state=1.2 has no unit; type one, as in --state=1.2TB."),
        ("--state 1.2TX", "error: --state must be a number of bytes, or one with a unit: "),
        ("--state 1TB --ranks 0", "error: --ranks=0 must be above 0."),
        ("--state 0GB", "error: --state=0 must be above 0."),
        ("--state 1TB --preset async_persistant", "Did you mean --preset=async_persistent?"),
        ("--state 1TB --mtbf 8", "error: --mtbf=8 has no unit; type one, as in --mtbf=8h."),
        ("--state 1TB --preset off", "error: --preset must be "),
        ("--state 1TB --recovery hots", "Did you mean --recovery=host?"),
        (
            "--state 1TB --recovery host --preset sync",
            "sync has inline; type --preset=async_persistent, or --recovery=",
        ),
        ("--state 1TB --recovery host --preset async_temporal", "async_temporal has temporal; type --preset="),
        ("--state 1TB --memory-every 30s", "type --recovery=host with it."),
        ("--state 1TB --recovery host --memory-every 30", "error: --memory-every=30 has no unit; type one, as in"),
        ("--state 1TB --measured nowhere", "error: There is no folder nowhere"),
        ("--state 1TB --recovery peer", "Did you mean --recovery=peers?"),
        ("--state 1TB --recovery peers --preset sync", "error: --recovery=peers needs the writer process of"),
        ("--state 1TB --hosts 0", "error: --hosts=0 must be from 1 to "),
        ("--state 1TB --hosts node[1-", "is not a number of hosts, and not their names; type --hosts=8, --hosts=node1"),
        (
            "--state 1TB --hosts node[3-1]",
            "error: --hosts=node[3-1]: [3-1] is not a range of numbers; type one such as",
        ),
        ("--state 1TB --hosts a,b,a", "error: --hosts=a,b,a has a twice; name each host once."),
        ("--state 1TB --hosts 4 --ranks 2", "--ranks=2 do not fill --hosts=4, which has 4 hosts; type --ranks=32, or"),
        ("--state 1TB --hosts 2 --ranks 32 --ranks-per-host 8", "type --ranks=16, or leave it out."),
        ("--state 1TB --link 10", "error: --link=10 has no unit; type one, as in --link=10GB/s."),
        ("--state 1TB --hsts 4", "error: ckpt plan does not take '--hsts'; did you mean --hosts?"),
        ("--state 1TB --config checkpoint/recovry=peers", "Did you mean checkpoint/recovery=peers?"),
        ("--state 1TB checkpoint/recovery=peers", "did you mean --config checkpoint/recovery=peers?"),
        ("--state 1TB --hosts -4", "error: --hosts=-4 is not a number of hosts"),
        ("--state 1TB --config asink", "error: There is no checkpoint=asink."),
        ("--state 1TB --config sync --preset sync", "error: sync and sync are two presets"),
        ("--state 1TB --config checkpoint/recovery=host checkpoint.recovery.every_steps=5", "type --step=1.5s, or"),
    ],
)
def test_mistakes_end_in_words(capsys: pytest.CaptureFixture[str], arguments: str, text: str) -> None:
    code, out, err = ckpt(capsys, *arguments.split())
    assert code == 2 and out == "" and text in err and len(err.splitlines()) == 1


def test_every_figure_says_where_it_is_from() -> None:
    peers = Recovery(RecoveryMode.peers, every_steps=5)
    for recovery, tiered in ((Recovery(RecoveryMode.host), False), (peers, False), (peers, True), (Recovery(), True)):
        figures = plan(Scenario(1e12, 64, 8, recovery=recovery, memory_every=5.0, tiered=tiered))
        assert all(figure.why for figure in figures) and len({figure.name for figure in figures}) == len(figures)


JOB = ["--state", "64GB", "--ranks", "16", "--hosts", "4", "--recovery", "peers"]
PEERS = [*JOB, "--link", "10GB/s", "--storage-gbps", "2", "--memory-every", "10s"]


def test_copies_on_other_hosts_cost_memory_and_bring_a_lost_host_back(capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(capsys, *PEERS)
    assert got["memory of a rank"] == 5 * 4e9 and got["copies in a rank"] == 2 * 4e9
    assert got["host memory"] == pytest.approx(4 * (7 * 4e9 + 15e6))
    assert got["sent to peers"] == pytest.approx(1.6), "four ranks share the link"
    assert got["repeated, from memory"] == pytest.approx(5 + 0.4)
    assert got["repeated, from peers"] == pytest.approx(5 + 0.4 + 1.6)
    assert got["restore from peers"] == pytest.approx(1.6 + got["restore from memory"])
    assert got["restore from storage"] == pytest.approx(32)
    twice = figures(capsys, *PEERS, "--config", "checkpoint.recovery.replicas=2")
    assert twice["copies in a rank"] == 4 * 4e9 and twice["sent to peers"] == pytest.approx(3.2)
    slow = figures(capsys, *PEERS, "--config", "checkpoint.recovery.max_bytes_per_second=100MB")
    assert slow["sent to peers"] == pytest.approx(40) and slow["repeated, from peers"] == pytest.approx(20 + 40.4)
    code, out, _ = ckpt(capsys, *JOB, "--hosts", "1", "--ranks", "8")
    assert code == 0 and "All ranks are on one host, so nobody has copies" in out
    unknown = figures(capsys, *JOB)
    assert unknown["link of a host"] is unknown["sent to peers"] is unknown["restore from peers"] is None


def test_who_has_copies_for_whom_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*words: str) -> dict[str, Any]:
        code, out, err = ckpt(capsys, *PEERS, *words, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    assert asked()["peers"] == {"host0": ["host2"], "host1": ["host3"], "host2": ["host0"], "host3": ["host1"]}
    given = "checkpoint.recovery.peers={n07: n08, n08: other}"
    found = asked("--hosts", "n[07-09],m", "--config", given, "checkpoint.recovery.replicas=2")
    assert found["peers"] == {"n07": ["n08", "n09"], "n08": ["m", "n07"], "n09": ["n07", "n08"], "m": ["n08", "n09"]}
    assert [note for note in found["notes"] if "names other, and no rank is there" in note]
    code, out, _ = ckpt(capsys, *PEERS, "--hosts", "16")
    table = [line.split() for line in out.splitlines() if line.startswith("host") and line.split()[0][4:].isdigit()]
    assert code == 0 and ["host3", "host11", "host11"] in table and "and so on, 8 more" in out


def test_what_is_lost_is_said_in_steps_and_where_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    tiered = ("--local-gbps", "2", "--step", "2s")
    code, out, _ = ckpt(capsys, *PEERS, *tiered, "--json")
    found = {each["lost"]: each for each in json.loads(out)["failures"]}
    assert code == 0 and {lost: each["place"] for lost, each in found.items()} == {
        "ranks, but no host": "memory",
        "a host": "peers",
        "a host and its peer": "storage",
        "no disk: all hosts restart": "local.dir",
    }
    limit = ["--config", "checkpoint.local.dir=/scratch/run", "checkpoint.upload.max_bytes_per_second=250MB"]
    assert figures(capsys, *PEERS, *tiered, *limit)["uploaded"] == pytest.approx(64), "four hosts upload 1 GB/s"
    assert found["a host"]["steps"] == pytest.approx(3.5) and found["a host"]["repeated_s"] == pytest.approx(7)
    local = found["no disk: all hosts restart"]
    assert local["restore_s"] == pytest.approx(16e9 / 2e9), "each host reads its own"
    later = found["a host and its peer"]["repeated_s"] - local["repeated_s"]
    assert later == pytest.approx(32), "it was uploaded later"
    alone, none = Scenario(1e9, 16, 4, recovery=Recovery(RecoveryMode.host)), Scenario(1e9, 16, 4)
    places = {each.place for each in failures_of(alone, plan(alone))}
    assert places == {"storage"}, "memory of one host is of no use to a job on several"
    assert failures_of(none, plan(none)) == []


@pytest.mark.slow
def test_rates_of_restores_and_of_the_link_are_read_from_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Machine().events(tmp_path, [1e9], ranks=2)
    told = tmp_path / "events" / "rank-00000.jsonl"
    common: dict[str, Any] = {"run": "0", "rank": 0, "time": 5, "path": "iter_3", "step": 3}
    events: list[dict[str, Any]] = [
        {**common, "event": "steps", "first": 1, "ends": [10.0, 10.5, 11.0]},
        {**common, "event": "peers", "bytes": 5e8, "sent": 5e8, "at_peers_s": 0.25},
    ]
    for source, seconds in (("memory", 0.25), ("peer", 0.5), ("storage", 2.0)):
        loaded = {"outcome": "loaded", "bytes": 1e9, "source": source, "seconds": seconds, "spans": {}}
        events.append({**common, "event": "load", **loaded})
    told.write_text("".join(f"{json.dumps(each)}\n" for each in events) + told.read_text().rpartition("\n")[0] + "\n")
    words = ["--state", "8GB", "--ranks", "4", "--ranks-per-host", "2", "--recovery", "peers"]
    got = figures(capsys, *words, "--measured", str(tmp_path))
    assert got["link of a host"] == pytest.approx(4e9), "both ranks are on one host"
    assert got["restore from memory"] == pytest.approx(1) and got["restore from peers"] == pytest.approx(2)
    assert got["restore from storage"] == pytest.approx(8)
    assert figures(capsys, *words, "--measured", str(tmp_path), "--link", "1GB/s")["restore from peers"] == 5
    every = ("--config", "checkpoint.recovery.every_steps=4", "--measured", str(tmp_path))
    assert figures(capsys, *words, *every)["repeated, from memory"] == pytest.approx(1 + 2e9 / 8e9, rel=0.1)
