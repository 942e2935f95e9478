"""The training job on several ranks: it computes what one process does, and saves, resumes and stops as one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ckpt_train.loop import run
from ckpt_train.training_job import TrainingJob
from omegaconf import DictConfig
from ranks import run_ranks
from safetensors.torch import load_model

from ckpt_component import build_manager
from ckpt_component.cli.app import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Composed = Callable[..., DictConfig]
Started = Callable[..., "subprocess.Popen[str]"]
SCRIPT = Path(__file__).parent / "scripts" / "train_ranks.py"
N = 3


@pytest.fixture
def folder(tmp_path: Path, text_file: Path, tiny: tuple[str, ...]) -> Path:
    """What the script reads: text.txt, and the overrides of a tiny run."""
    (tmp_path / "tiny.json").write_text(json.dumps(tiny))
    return tmp_path


def in_one_process(config: DictConfig, folder: Path) -> list[float]:
    summary = run(TrainingJob(config, "/"), config.checkpoint, str(folder))
    return [loss for _, loss in [*summary.losses, *summary.validation]]


def exported_model(root: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `ckpt export hf` makes of the newest checkpoint, loaded by safetensors."""
    with pytest.raises(SystemExit, match="0"):
        main(["export", "hf", str(root), str(root / "exported"), "-q"])
    load_model(model, root / "exported" / "model.safetensors")
    shutil.rmtree(root / "exported")
    return model.state_dict()


@pytest.mark.turns(3)
def test_every_kind_has_the_losses_of_one_process(folder: Path, compose_job: Composed) -> None:
    run_ranks(SCRIPT, "losses", 2, folder)
    found = json.loads((folder / "losses.json").read_text())
    assert len(found) == 6
    for size in (2, 3):
        config = compose_job("checkpoint=off", "model.dropout=0", "train.steps=4", f"train.batch_size={size}")
        alone = in_one_process(config, folder)
        assert alone[0] - alone[3] > 0.05  # it learns, so equal losses are no accident
        for kind in ("ddp", "fsdp", "tp"):
            assert found[f"{kind} {size}"] == pytest.approx(alone, rel=1e-5), (kind, size)


@pytest.mark.turns(3)
def test_a_resumed_run_is_the_uninterrupted_one_and_goes_on_on_any_number_of_ranks(
    folder: Path, compose_job: Composed
) -> None:
    in_one_process(compose_job(f"train.steps={2 * N}"), folder / "one")
    run_ranks(SCRIPT, "resumes", 2, folder, timeout=200)
    shared = run_ranks(SCRIPT, "resumes_of_others", 2, folder, timeout=200)[0]
    lines = [line.split(" ", 3) for line in shared.splitlines() if line.startswith("LOSSES")]
    assert len(lines) == 6
    alone = {}
    for saved in ("one", "ddp", "fsdp", "tp"):
        exported = exported_model(folder / saved, TrainingJob(compose_job(), "/").model)
        config = compose_job(
            "checkpoint.save.at_end=false",
            "checkpoint.save.every_steps=null",
            f"train.steps={2 * N + 2}",
            "model.dropout=0",
        )
        job = TrainingJob(config, "/")
        with build_manager(config.checkpoint, dir=folder / saved) as manager:
            assert manager.restore(job.state) == 2 * N
        assert exported.keys() == job.model.state_dict().keys()
        assert all(torch.equal(value, exported[key]) for key, value in job.model.state_dict().items()), saved
        job = TrainingJob(config, "/")
        summary = run(job, config.checkpoint, str(folder / saved))
        assert (summary.start, summary.step, len(summary.losses)) == (2 * N, 2 * N + 2, 2)
        alone[saved] = [loss for _, loss in [*summary.losses, *summary.validation]]
    for _, saved, kind, losses in lines:
        assert json.loads(losses) == pytest.approx(alone[saved], rel=1e-5), (saved, kind)


def test_heads_that_ranks_do_not_divide_are_refused(folder: Path) -> None:
    run_ranks(SCRIPT, "tp_refuses", 2, folder)


def committed(folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*") if (path / "manifest.json").exists()
    )


@pytest.mark.turns(3)
def test_one_folder_one_result_and_one_voice(train: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = train("parallel=fsdp", "train.steps=4", "checkpoint.save.every_steps=2", ranks=2)
    assert code == 0, output
    assert output.count("step 4/4") == 1 and "2 ranks (parallel=fsdp)" in output
    run_dir = tmp_path / "run"
    assert committed(run_dir / "checkpoints") == [2, 4]
    [result] = run_dir.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "completed"
    logs = sorted(path.name for path in result.parent.glob("*.log"))
    assert logs == ["ckpt-train.rank0.log", "ckpt-train.rank1.log"]
    assert "step 4/4" in (result.parent / logs[1]).read_text()
    assert sorted(path.name for path in (result.parent / ".hydra").iterdir()) == ["rank0", "rank1"]
    # outputs/<day>/<time>, as one process has it
    assert len(result.relative_to(run_dir / "outputs").parts) == 3

    code, output = train("train.steps=5")
    assert code == 0 and "restored step 4 from" in output, output


@pytest.mark.soak
def test_a_sweep_on_two_ranks(train: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = train("train.steps=2", "parallel=tp", "checkpoint/stager=shared_memory,none", "-m", ranks=2)
    assert code == 0, output
    paths = sorted((tmp_path / "run" / "multirun").rglob("result.json"), key=lambda path: path.parent.name)
    assert [path.parent.name for path in paths] == ["0", "1"]
    states = [json.loads(path.read_text())["status"] for path in paths]
    assert states == ["completed", "skipped"]
    assert [committed(path.parent / "checkpoints") for path in paths] == [[2], []]


def test_a_mistake_is_told_in_words(train: Callable[..., tuple[int, str]]) -> None:
    code, output = train("parallel=dpp", ranks=2)
    assert code != 0 and "parallel must be ddp, fsdp or tp, got dpp." in output


def test_ranks_without_a_launcher_are_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_component.train"],
        cwd=tmp_path,
        env=None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "RANK expected, but not set. Start them with torchrun." in done.stderr
    assert "Traceback" not in done.stderr


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The output up to the line with these words; fails when the process ends before."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError("".join(seen))


def workers_of(torchrun: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks, in order; torchrun starts them in it."""
    return sorted(psutil.Process(torchrun.pid).children(), key=lambda process: int(process.environ()["RANK"]))


def end(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun and all that it started, however the test went."""
    left = psutil.Process(torchrun.pid).children(recursive=True) if torchrun.poll() is None else []
    for process in left:
        process.kill()
    torchrun.kill()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "tp"])
def test_sigterm_to_all_processes_saves_once_and_leaves_in_time(
    start: Started, train: Callable[..., tuple[int, str]], tmp_path: Path, kind: str
) -> None:
    endless = (f"parallel={kind}", "train.steps=1000000", "train.eval_every=null", "train.log_every=5")
    with start(*endless, "checkpoint.save.every_steps=null", "checkpoint.save.at_end=false", ranks=2) as process:
        try:
            read_until(process, "step      10/1000000")
            workers = workers_of(process)
            asked = time.monotonic()
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
            _, alive = psutil.wait_procs(workers, timeout=5)
        finally:
            end(process)
    # torchrun kills after 30 s; whoever needs that long has lost its save.
    assert not alive and time.monotonic() - asked < 25, output
    assert process.returncode != 0
    [last] = committed(tmp_path / "run" / "checkpoints")
    assert output.count(f"stopped by SIGTERM after step {last}, which is saved") == 1
    [result] = (tmp_path / "run").rglob("result.json")
    assert json.loads(result.read_text())["status"] == "stopped"
    if kind == "tp":
        code, output = train(f"train.steps={last + 1}")
        assert code == 0 and f"restored step {last} from" in output, output


@pytest.mark.turns(3)
def test_torchrun_starts_again_from_the_last_commit_after_a_rank_was_killed_in_mid_save(
    start: Started, tmp_path: Path
) -> None:
    saves = ("checkpoint.save.every_steps=40", "checkpoint.timeouts.heartbeat=5", "train.eval_every=null")
    checkpoints = tmp_path / "run" / "checkpoints"
    with start("train.steps=120", *saves, ranks=2, torchrun=["--max-restarts=1"]) as process:
        try:
            before = read_until(process, "iter_0000040 committed")
            killed = workers_of(process)[1]
            [writer] = [child for child in killed.children() if "writing.worker" in " ".join(child.cmdline())]
            writer.suspend()  # so that the next save is under way for as long as it takes
            deadline = time.monotonic() + 60
            while not list(checkpoints.glob(".ckpt-tmp.iter_*.*")) and time.monotonic() < deadline:
                time.sleep(0.02)
            [unfinished] = checkpoints.glob(".ckpt-tmp.iter_*.*")
            killed.kill()
            writer.resume()
            output, _ = process.communicate(timeout=100)
        finally:
            end(process)
    assert process.returncode == 0, before + output
    assert "restored step 40 from" in output
    assert not unfinished.exists()
    assert committed(tmp_path / "run" / "checkpoints") == [40, 80, 120]
    [result] = (tmp_path / "run").rglob("result.json")  # the second start goes on in the folder of the first
    figures: dict[str, Any] = json.loads(result.read_text())["figures"]
    assert (figures["start"], figures["step"]) == (40, 120)
