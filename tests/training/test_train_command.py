"""`python -m ckpt_train.app` as a user meets it, in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from strides import in_turn

from ckpt_component import stored_config
from ckpt_component.cli.reports.sweep_report import report

pytestmark = pytest.mark.slow

Trained = Callable[..., tuple[int, str]]
Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def results(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("result.json"), key=lambda path: path.parent.name)
    return [json.loads(path.read_text()) for path in paths]


def committed(folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*") if (path / "manifest.json").exists()
    )


def test_run_and_run_again(train: Trained, run_dir: Path) -> None:
    arguments = ("train.steps=20", "checkpoint.save.every_steps=10")
    code, output = train(*arguments)
    assert code == 0, output
    assert committed(run_dir / "checkpoints") == [10, 20]
    stored = stored_config(run_dir / "checkpoints" / "iter_0000020")
    assert stored.config["train"]["steps"] == 20 and stored.config["checkpoint"]["save"]["every_steps"] == 10
    assert "hydra" not in stored.config and stored.resolved["model"]["width"] == 16
    [result] = results(run_dir / "outputs")
    assert result["status"] == "completed" and result["figures"]["saves"] == 2
    assert "train.steps=20" in result["overrides"] and result["choices"]["checkpoint"] == "async_persistent"

    # With another current folder for the job, the checkpoints are still those of the folder it was started in.
    code, output = train(
        "train.steps=30", "checkpoint.save.every_steps=10", "hydra.job.chdir=true", "hydra.run.dir=elsewhere"
    )
    assert code == 0, output
    assert "restored step 20" in output
    assert committed(run_dir / "checkpoints") == [10, 20, 30]


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_sweep_keeps_its_jobs_apart_and_skips_what_cannot_work(train: Trained, run_dir: Path) -> None:
    code, output = train("train.steps=3", "checkpoint/stager=shared_memory,none", "checkpoint.writer.workers=1,2", "-m")
    assert code == 0, output
    assert "restored step" not in output and "Traceback" not in output
    jobs = results(run_dir / "multirun")
    assert [job["status"] for job in jobs] == ["completed", "completed", "skipped", "skipped"]
    assert "checkpoint/stager=none" in jobs[2]["reason"] and output.count("[WARNING] skipped: ") == 2
    assert not (run_dir / "checkpoints").exists()
    folders = sorted((run_dir / "multirun").rglob("checkpoints"), key=lambda path: path.parent.name)
    assert [(folder.parent.name, committed(folder)) for folder in folders] == [("0", [3]), ("1", [3])]
    # It ends with the report, in which the refused pairs are rows too.
    shown = output[output.index("what differs") :]
    assert "rows with figures: 2 of 4, sorted by first stall" in shown and shown.count("  skipped: ") == 2
    assert len(list((run_dir / "multirun").rglob("sweep.csv"))) == 1


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_sweep_is_reported_when_a_job_fails_and_when_it_is_killed(
    start: Started, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second job fails, and the third is killed.
    steps = "train.steps=2,0,1000000"
    with start(steps, "hydra.sweep.dir=sweep", "-m") as process:
        try:
            read_until(process, "step       5/1000000")
        finally:
            process.kill()
    report(run_dir / "sweep")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("completed") and "train.steps=2 " in line for line in lines)
    assert any("failed: train.steps must be at least 1, got 0" in line for line in lines)
    assert any("not finished (it runs, or was killed)" in line and "train.steps=1000000" in line for line in lines)


@pytest.mark.turns(2)
@pytest.mark.slow
def test_a_killed_sweep_continues_and_returns_what_it_would_have_returned(
    killed_and_continued: Callable[..., tuple[str, dict[str, Any]]], run_dir: Path
) -> None:
    output, returned = killed_and_continued("train.lr=0.003,0.001,0.01,0.02")
    assert len(returned) == 4 and all(len(values) == 2 for values in returned.values())
    assert output.count("ended before, and returns ") == 1 and "#0 : ended before" in output
    assert output.count("continues in ") == 1 and "#1 : continues in killed/1" in output
    assert output.count("restored step ") == 1 and f"from {run_dir}/killed/1/checkpoints/iter_00000" in output
    # Its figures are those of all saves, as in the others; of the last one before the kill nothing may be recorded.
    saves = [job["figures"]["saves"] for job in results(run_dir / "killed")]
    assert [saves[0], *saves[2:]] == [12] * 3 and saves[1] in (11, 12)


@pytest.mark.turns(4)
@pytest.mark.slow
def test_a_job_that_was_killed_when_it_was_done_returns_its_objective(train: Trained, run_dir: Path) -> None:
    words = ["train.steps=10", "checkpoint.save.every_steps=5", "objectives=[loss,validation_loss,stall_s]"]
    words += ["hydra.sweep.dir=sweep", "-m"]
    assert train(*words)[0] == 0
    [before] = results(run_dir / "sweep")
    result = run_dir / "sweep" / "0" / "result.json"
    result.write_text(json.dumps({**before, "status": "running", "returned": None}))
    code, output = train(*words)
    assert code == 0 and "restored step 10" in output, output
    [after] = results(run_dir / "sweep")
    assert json.loads(after["returned"]) == pytest.approx(json.loads(before["returned"]), abs=1e-4)


@pytest.mark.soak
def test_a_recipe_may_be_a_sweep(train: Trained, run_dir: Path) -> None:
    code, output = train("+recipe=writer_sweep", "train.steps=2", "hydra.sweep.dir=sweep")
    assert code == 0, output
    jobs = results(run_dir / "sweep")
    assert len(jobs) == 6 and {job["status"] for job in jobs} == {"completed"}
    assert {job["choices"]["checkpoint/writer"] for job in jobs} == {"dcp", "torch_save"}


@pytest.mark.slow
def test_parts_that_do_not_fit_end_a_single_run_in_words(train: Trained, run_dir: Path) -> None:
    code, output = train("checkpoint/stager=none")
    assert code == 1 and "Traceback" not in output
    assert "checkpoint/stager=none" in output and "Use checkpoint/caller=inline" in output
    [result] = results(run_dir)
    assert result["status"] == "failed" and "checkpoint/stager=none" in result["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    in_turn(
        [
            ("checkpoint.dir=${oc.env:NOT_SET}/ck", "checkpoint.dir: KeyError raised while resolving interpolation"),
            ("train.lr=${oc.env:NOT_SET}", "Environment variable 'NOT_SET' not found"),
            ("checkpoint=async_persistant", "Did you mean checkpoint=async_persistent?"),
            ("checkpoint.writer.worker=2", "Did you mean checkpoint.writer.workers=2?"),
            ("train.step=3", "Did you mean train.steps=3?"),
            ("model=gpt_mano", "Did you mean model=gpt_nano?"),
            ("data.path=/nowhere", "data.path=/nowhere does not exist"),
            ("train.steps=0", "train.steps must be at least 1, got 0"),
            ("train.device=gpu", "gpu"),
            ("checkpoint.resume=must", "has no committed checkpoint"),
        ],
        3,
    ),
)
def test_a_mistake_ends_with_code_1_and_without_a_traceback(train: Trained, override: str, told: str) -> None:
    code, output = train(override)
    assert code == 1, output
    assert told in output and "Traceback" not in output


@pytest.mark.turns(3)
@pytest.mark.slow
def test_without_numpy_the_first_line_is_ours(tmp_path: Path, tiny: tuple[str, ...], text_file: Path) -> None:
    code = "import sys; sys.modules['numpy'] = None; from ckpt_train.app import main; main()"
    words = [*tiny, f"data.path={text_file}", "train.steps=1", "checkpoint=off"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NumPy" not in done.stdout + done.stderr


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The output up to the line with these words; fails when the process ends before."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError("".join(seen))


@pytest.mark.slow
def test_a_run_that_fails_says_nothing_of_what_was_typed(train: Trained) -> None:
    code, output = train("checkpoint.resume=must", "hydra.run.dir=out")
    assert code == 1 and "use resume=auto to start from scratch." in output and "There is no" not in output


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_killed_run_resumes_from_its_last_commit(start: Started, train: Trained, run_dir: Path) -> None:
    with start("train.steps=1000000", "checkpoint.save.every_steps=3") as process:
        try:
            read_until(process, "iter_0000006 committed")
            workers = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
    # The writer process outlives the trainer to finish what was staged, and then goes.
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    last = committed(run_dir / "checkpoints")[-1]
    code, output = train(f"train.steps={last + 1}")
    assert code == 0, output
    assert f"restored step {last} from" in output
    assert committed(run_dir / "checkpoints")[-1] == last + 1


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGUSR1, 85)],
)
def test_a_signal_saves_the_step_and_ends(
    start: Started, train: Trained, run_dir: Path, number: signal.Signals, code: int
) -> None:
    with start("train.steps=1000000", "checkpoint.save.every_steps=null", "checkpoint.save.at_end=false") as process:
        try:
            read_until(process, "step       5/1000000")
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, output
    [last] = committed(run_dir / "checkpoints")
    assert f"stopped by {number.name} after step {last}, which is saved" in output
    [result] = results(run_dir)
    assert result["status"] == "stopped" and result["reason"] == number.name and result["figures"]["step"] == last
    if number == signal.SIGTERM:
        code, output = train(f"train.steps={last + 1}")
        assert code == 0 and f"restored step {last} from" in output
