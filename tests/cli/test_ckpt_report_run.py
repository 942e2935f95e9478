"""`ckpt report` of the folder of a run: what its saves cost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_events import BEGAN, STALL, STEP, write_run

from ckpt_component.cli.app import main
from ckpt_component.cli.reports.run_records import PHASES
from ckpt_component.events import EventFile


def ckpt(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["report", *arguments])
    return int(left.value.code or 0)


@pytest.fixture
def without_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib."""
    monkeypatch.setattr("ckpt_component.cli.reports.page.can_plot", lambda: False)


@pytest.mark.slow
def test_it_shows_phases_failures_and_what_training_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, ranks=2, failed=2, first=11)
    assert ckpt(str(run), "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path))
    # 59 steps of 20 ms and two waits of 10 ms between the first and the last step, then the wait for the last save;
    # the loss of each save is 20 ms.
    kept = 1 - 3 * 2 * STALL / (59 * STEP + 3 * STALL)
    assert f"training kept {100 * kept:.2f} % of 1.21 s: saves cost 60 ms (waits 30 ms, slower steps 30 ms)" in text
    assert "steps 11 to 70, median 20 ms" in text
    assert "saves: 2 committed, 1 failed, 1 retried, 4.00 GB at 29.41 GB/s" in text
    assert "loaded step 10: 1.00 GB in 500 ms, verified" in text
    assert "step 50 failed: rank 0: the disk is full" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["30"]]
    assert row[1] == "committed" and row[2:4] == ["2.00", "GB"] and "100 ms" in " ".join(row)
    page = (tmp_path / "out" / "run.html").read_text()
    assert "training kept" in page and "data:image/png;base64," in page
    assert '<th>step</th><th class="left">outcome</th>' in page and '<td>30</td><td class="left">committed</td>' in page


@pytest.mark.usefixtures("without_picture")
def test_what_was_written_and_what_was_reused(
    sharing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert ckpt(str(sharing), "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [save["reused"] > 1_000_000 for save in run["saves"]] == [False, True, True, True]
    assert [save["bytes"] > 1_000_000 for save in run["saves"]] == [True, False, False, False]
    assert run["reused"] == sum(save["reused"] for save in run["saves"])
    assert ckpt(str(sharing)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-2].startswith("reused: ")
    assert any(line.startswith("saves: 4 committed, 1.") and line.endswith(" MB reused") for line in lines)
    (header,) = [line.split() for line in lines if line.startswith("step ")]
    assert header[:4] == ["step", "outcome", "written", "reused"]
    write_run(tmp_path / "older")  # an earlier release did not record it
    assert ckpt(str(tmp_path / "older")) == 0 and "reused" not in capsys.readouterr().out


@pytest.mark.usefixtures("without_picture")
def test_published_versions_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There may be one for each step."""
    write_run(tmp_path, saves=2)
    same = {"event": "publish", "run": f"run {BEGAN:.0f}", "rank": 0, "path": "run/iter_0000020"}
    sizes = {"bytes": 4 * 10**6, "whole_bytes": 10**9, "seconds": 0.5, "lag": 0.7}
    for number in (1, 2, 3):
        about = {"step": 20 * number, "version": number, "whole": number == 1, "skipped": number - 1}
        event = {**same, **sizes, **about, "time": BEGAN + number, "outcome": "published", "target": "weights"}
        EventFile(str(tmp_path), 0).append([event])
    failed = {**same, "time": BEGAN + 9, "step": 80, "outcome": "failed", "error": "the bucket is gone"}
    EventFile(str(tmp_path), 0).append([failed])
    assert ckpt(str(tmp_path), "--json") == 0
    published = json.loads(capsys.readouterr().out)["runs"][0]["published"]
    counts = {"versions": 3, "whole": 1, "version": 3, "step": 60, "skipped": 3, "errors": ["the bucket is gone"]}
    assert published == {**counts, "bytes": 12 * 10**6, "whole_bytes": 3 * 10**9, "seconds": 0.5, "lag": 0.7}
    assert ckpt(str(tmp_path)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "published: 3 versions, 1 whole, 12.00 MB for 3.00 GB; 500 ms each, 700 ms after the commit" in text
    assert "the last: version 3, step 60, 3 checkpoints skipped" in text and "not published: the bucket is gone" in text


@pytest.mark.usefixtures("without_picture")
def test_snapshots_in_memory_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There may be one for each step: they are no line each, and no checkpoint."""
    write_run(tmp_path, saves=2)
    same = {"event": "save", "run": f"run {BEGAN:.0f}", "rank": 0, "memory": True, "stall_s": STALL, "lost_s": STALL}
    spans = {"stage": [0.0, STALL], "commit": [STALL, 0.03]}
    for step in (5, 6, 7):
        failed = {"outcome": "failed", "error": "no memory"} if step == 7 else {"outcome": "committed"}
        save = {"time": BEGAN + 1.1, "step": step, "path": f"host://runs/a@1f-0a/iter_{step}", "spans": spans}
        EventFile(str(tmp_path), 0).append([{**same, **save, **failed}])
    load = {"event": "load", "step": 4, "path": "host://x", "source": "memory", "bytes": 10**9, "spans": {}}
    EventFile(str(tmp_path), 0).append([{**load, "run": same["run"], "rank": 0, "time": BEGAN, "seconds": 0.5}])
    assert ckpt(str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "in memory alone: 2 snapshots, 1 failed or skipped; stall 10 ms, whole after 30 ms (medians)" in lines
    assert "not kept in memory: no memory" in lines
    assert any(line.startswith("saves: 2 committed, 2.00 GB") for line in lines)
    assert any(line.startswith("loaded step 4 from memory: ") for line in lines)
    assert [line.split()[0] for line in lines if " committed " in line and line[0] != "s"] == ["20", "40"]
    assert ckpt(str(tmp_path), "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [save["step"] for save in run["saves"]] == [20, 40] and run["stall_s"] == pytest.approx(5 * STALL)
    assert (run["in_memory"]["whole"], run["in_memory"]["failed"]) == (2, 1)
    # The steps whose snapshot stayed in memory alone made training wait too.
    assert run["lost_s"] == pytest.approx(2 * 2 * STALL + 3 * STALL)


@pytest.mark.usefixtures("without_picture")
def test_json_has_every_run_and_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = write_run(tmp_path, saves=1)
    write_run(tmp_path, first=11, began=end + 5)
    assert ckpt(str(tmp_path), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    first, second = data["runs"]
    assert data["kind"] == "run" and abs(second["began"] - first["ended"] - 5) < 0.01
    assert [len(run["saves"]) for run in (first, second)] == [1, 3]
    assert abs(first["saves"][0]["write_s"] - 0.058) < 1e-6 and first["saves"][0]["durable_s"] == 0.1
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == ["rank-00000.jsonl"]
    assert ckpt(str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "ran for" in text and "no picture: pip install" in text


def test_json_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckpt_component.cli.reports.result import write_result

    write_result(str(tmp_path), "completed", overrides=["a=1"], choices={}, figures={"stall_s": 0.5})
    assert ckpt(str(tmp_path), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "sweep" and [row["stall_s"] for row in data["rows"]] == [0.5]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_run_that_just_began_and_one_that_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    write_run(tmp_path / "began", saves=0, began=now)
    assert ckpt(str(tmp_path / "began")) == 0
    assert "no saves yet" in (text := capsys.readouterr().out) and "last event" in text
    assert (tmp_path / "began" / "events" / "run.html").exists()
    write_run(tmp_path / "writes", saves=2, began=now)
    with open(tmp_path / "writes" / "events" / "rank-00000.jsonl", "a") as file:
        file.write('{"event": "save", "time": 1')  # not all of the line is there yet
    other = {"run": "2", "rank": 0, "time": 5}
    EventFile(str(tmp_path / "writes"), 0).append([{"event": "save", **other}, {"event": "steps", **other, "ends": 1}])
    assert ckpt(str(tmp_path / "writes"), "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["committed"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_picture")
def test_a_hundred_thousand_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, saves=200, every=500)
    assert ckpt(str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "steps 1 to 100000, median 20 ms" in text and len(text.splitlines()) < 40
    assert "the last 15 of 200 saves; --json has all" in text


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("nowhere", "error: There is no folder nowhere; give the folder"),
        ("bare", "error: bare has no events; runs write them with their first save"),
    ],
)
def test_a_folder_without_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare" / "iter_0000001").mkdir(parents=True)
    assert ckpt(folder) == 2
    error = capsys.readouterr().err
    assert told in error and ("of a sweep need hydra/callbacks" in error) == (folder == "bare")


def test_it_needs_neither_torch_nor_hydra(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = (
        "import sys\nfrom ckpt_component.cli.app import main\n"
        f"try:\n    main(['report', {str(tmp_path)!r}, '--json'])\n"
        "finally:\n    print({'torch', 'hydra', 'omegaconf', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr.strip() == "set()", done.stderr


def test_long_lines_lose_columns_not_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = {name: [100 * place, 100 * place + 99.5] for place, name in enumerate(PHASES)}
    save = {"event": "save", "time": 1e9, "step": 123456, "path": "iter_0123456", "outcome": "committed", "error": None}
    save |= {"bytes": 123_450_000_000, "attempts": 1, "stall_s": 99.5, "lost_s": 99.5, "spans": spans}
    tmp_path.joinpath("iter_0123456").mkdir()
    EventFile(str(tmp_path), 0).append([{**save, "run": "a", "rank": 0}])
    assert ckpt(str(tmp_path), "--out", str(tmp_path / "out")) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("123456")]
    header = lines[lines.index(row) - 1].split()
    assert len(row) <= 100 and len(row.split()) > len(header) and header[-2:] == ["durable", "lost"]
    assert "queue" not in header and "commit" in header


def test_the_run_that_saved_is_shown_though_a_later_one_trained_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = write_run(tmp_path, saves=2)
    write_run(tmp_path, saves=0, first=41, began=end + 5)
    assert ckpt(str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["shown"] == 1
    assert ckpt(str(tmp_path), "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert "saves: 2 committed" in text and "above: run 1 of 2; --run N shows another" in text
    assert ckpt(str(tmp_path), "--run", "2", "--out", str(tmp_path / "out")) == 0
    assert "saves: 0 committed" in capsys.readouterr().out
    assert ckpt(str(tmp_path), "--run", "3") == 2
    assert "--run=3: the folder has the events of 2 run(s)" in capsys.readouterr().err


@pytest.mark.usefixtures("without_picture")
def test_no_line_says_where_files_are_that_were_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert ckpt(str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no picture: pip install matplotlib"


@pytest.mark.usefixtures("without_picture")
def test_a_wait_that_lasts_is_shown_until_it_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ranks=2)
    now, same = time.time(), {"event": "wait", "run": f"run {BEGAN:.0f}"}

    def wait(rank: int, whom: str, since: float, until: float | None, ended: float | None = None) -> None:
        times = {"time": now, "since": since, "until": until, "ended": ended}
        EventFile(str(tmp_path), rank).append([{**same, **times, "rank": rank, "for": whom}])

    wait(0, "rank 1, which has not voted", now - 12, now + 48)
    wait(1, "uploads of another run", now - 30, None)
    wait(1, "a process that was killed", now - 900, now - 600)
    wait(0, "a lock", now - 20, now + 60)
    wait(0, "a lock", now - 20, now + 60, now - 2)
    assert ckpt(str(tmp_path)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "has waited" in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith("rank 0 has waited 1") and "for rank 1, which has not voted, at most 4" in lines[0]
    assert lines[1].startswith("rank 1 has waited 3") and lines[1].endswith(" for uploads of another run")
    assert ckpt(str(tmp_path), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"][0]["waits"]) == 3
