from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from ckpt_train.schema import register
from hydra import compose, initialize_config_dir
from kept_configs import compose_app_once
from omegaconf import DictConfig
from programs import run_on_ranks, run_program

import ckpt_component
from ckpt_component.cli.reports.result import read_jobs
from ckpt_component.config import config_dir, override_hints

#: A model and a text that train in milliseconds. Dropout is on, so that the random generators count.
TINY = (
    "model.layers=2",
    "model.heads=2",
    "model.width=16",
    "model.context=16",
    "model.dropout=0.1",
    "train.batch_size=2",
    "train.accumulate=2",
    "train.warmup_steps=3",
    "train.log_every=1",
    "train.eval_every=4",
    "train.device=cpu",
    "checkpoint.durability=process_crash",
)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A file of text that has 19 windows to train on: an epoch ends every five steps."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(33 + (17 * n * n + n) % 90 for n in range(340)))
    return path


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """The overrides of a tiny run."""
    return TINY


@pytest.fixture
def compose_job(text_file: Path) -> Callable[..., DictConfig]:
    """Compose the config of a tiny run with more overrides, as `ckpt-train` does."""

    def composed(overrides: Sequence[str]) -> DictConfig:
        register()
        version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
        with override_hints(), initialize_config_dir(str(config_dir()), **version):
            return compose("train", [*overrides])

    return lambda *overrides: compose_app_once("train", composed, [*TINY, f"data.path={text_file}", *overrides])


@pytest.fixture
def start(tmp_path: Path, text_file: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `python -m ckpt_train.app` for a tiny run in the folder tmp_path/run; the caller ends it.

    With `ranks`, torchrun starts that many, with its own options in `torchrun`. `session`: in a session of its own.
    """
    folder = tmp_path / "run"
    folder.mkdir()

    def started(
        *arguments: str,
        tiny: Sequence[str] = TINY,
        ranks: int | None = None,
        torchrun: Sequence[str] = (),
        session: bool = False,
    ) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *torchrun]
        launcher += [f"--log-dir={tmp_path}"]  # else in /tmp, and left there when it is killed
        return subprocess.Popen(
            [
                sys.executable,
                *([] if ranks is None else launcher),
                *("-m", "ckpt_component.train", *tiny, f"data.path={text_file}", *arguments),
            ],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{Path(ckpt_component.__file__).parents[1]}:{Path(__file__).parent / 'scripts'}",
                **({} if ranks is None else {"OMP_NUM_THREADS": "1"}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=session,
        )

    return started


@pytest.fixture
def killed_and_continued(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Run a sweep whose second job has everything killed with SIGKILL, run the same line again, and then without a kill.

    Gives the output of the second run, and what each job returned, by its learning rate. It is the same as without a
    kill.
    """
    folder = tmp_path / "run"

    def run(*arguments: str) -> tuple[int, str]:
        words = ("objectives=[loss,validation_loss]", "checkpoint.save.every_steps=5", "train.steps=60")
        listener = "checkpoint.listeners=[{_target_:killer.Killer}]"
        process = start(*words, "train.threads=1", "train.log_every=3", listener, *arguments, "-m", session=True)
        try:
            output, _ = process.communicate(timeout=150)
        finally:
            process.kill()
        if process.returncode == -signal.SIGKILL:
            for path in Path("/dev/shm").glob(f"*[-_]{process.pid}[-_]*"):  # joblib's, which it removes at its end
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return process.returncode, output

    def returned(sweep: str) -> dict[str, Any]:
        rows = read_jobs(folder / sweep)
        assert all(row.status == "completed" for row in rows), rows
        return {word: row.returned for row in rows for word in row.overrides if word.startswith("train.lr=")}

    def tried(*arguments: str) -> tuple[str, dict[str, Any]]:
        (folder / "kill").write_text("1")
        code, output = run(*arguments, "hydra.sweep.dir=killed")
        assert code == -signal.SIGKILL and not (folder / "kill").exists(), output
        assert "If this sweep is killed, the same command continues it." in output
        code, output = run(*arguments, "hydra.sweep.dir=killed")
        assert code == 0, output
        again = returned("killed")
        code, whole = run(*arguments, "hydra.sweep.dir=whole")
        assert code == 0, whole
        assert again == returned("whole")
        return output, again

    return tried


@pytest.fixture
def train(start: Callable[..., object], tmp_path: Path, text_file: Path) -> Callable[..., tuple[int, str]]:
    """Run a tiny training in a process of its own, or one per rank; returns exit code and output."""

    def trained(*arguments: str, tiny: Sequence[str] = TINY, ranks: int = 1) -> tuple[int, str]:
        words, folder = ["-m", "ckpt_component.train", *tiny, f"data.path={text_file}", *arguments], tmp_path / "run"
        runs = [run_program(words, folder)] if ranks == 1 else run_on_ranks(words, folder, ranks)
        return max(done.returncode for done in runs), "".join(done.stdout for done in runs)

    return trained


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take most of the time of a model this small where other tests run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
