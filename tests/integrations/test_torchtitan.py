"""torchtitan's own Trainer and command line on CPUs (see scripts/torchtitan_job.py), with our checkpoints and without."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointConfigError

pytest.importorskip("torchtitan")

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_job.py"
OVERRIDE = "ckpt_component.integrations.torchtitan.checkpoint"
OURS = ("--checkpoint.enable", "--override.imports", OVERRIDE)
STOCK = ("--checkpoint.enable",)


def start(folder: Path, *flags: str, ranks: int = 1, **env: str) -> list[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    # The default of torchtitan 0.3.0 for FSDP needs a newer torch than 2.13.
    partial = ("--parallelism.spmd_backend", "partial_dtensor") if ranks > 1 else ()
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), "losses", *flags, *partial],
            cwd=folder,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def run(folder: Path, *flags: str, ranks: int = 1, code: int = 0, **env: str) -> str:
    """Train until the end; what the ranks printed."""
    processes = start(folder, *flags, ranks=ranks, **env)
    try:
        output = "\n".join(process.communicate(timeout=150)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {code}, output
    return output


def losses(folder: Path, rank: int = 0) -> list[tuple[int, str]]:
    lines = [line.split() for line in (folder / f"losses-{rank}").read_text().splitlines()]
    return [(int(step), loss) for step, loss in lines]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("ranks", "preset"),
    [
        (1, "async_persistent"),
        pytest.param(1, "async_zero_overhead", marks=pytest.mark.slow),
        pytest.param(2, "async_persistent", marks=pytest.mark.slow),  # FSDP
    ],
)
def test_a_killed_run_goes_on_as_one_without_checkpoints(tmp_path: Path, ranks: int, preset: str) -> None:
    ours = ("--checkpoint.enable", "--override.imports", f'{OVERRIDE}={{"preset": "{preset}"}}')
    run(tmp_path / "without", ranks=ranks)
    whole = losses(tmp_path / "without")
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    run(tmp_path / "ours", *ours, ranks=ranks, code=-signal.SIGKILL, SIGNAL="SIGKILL", SIGNAL_AT="4")
    assert losses(tmp_path / "ours") == whole[:3]
    assert "restored step 2 from" in run(tmp_path / "ours", *ours, ranks=ranks)
    assert losses(tmp_path / "ours") == whole[:3] + whole[2:]
    steps = sorted(path.name for path in (tmp_path / "ours/outputs/checkpoint").glob("step-*"))
    assert steps == ["step-2", "step-4", "step-6"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_warning_ends_a_run_that_goes_on_after_the_same_step(tmp_path: Path) -> None:
    run(tmp_path, *OURS, code=85, SIGNAL="SIGUSR1", SIGNAL_AT="3")
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    assert "restored step 3 from" in run(tmp_path, *OURS)
    run(tmp_path / "without")
    assert losses(tmp_path) == losses(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_stock_torchtitan_goes_on_from_ours_and_ours_from_stock(tmp_path: Path) -> None:
    run(tmp_path / "ours", *OURS)
    whole = losses(tmp_path / "ours")
    for folder, before, flags, step in (("stock", "ours", STOCK, 2), ("again", "stock", OURS, 4)):
        source = tmp_path / before / "outputs/checkpoint" / f"step-{step}"
        shutil.copytree(source, tmp_path / folder / "outputs/checkpoint" / source.name)
        run(tmp_path / folder, *flags)
        assert losses(tmp_path / folder) == whole[step:]
    assert (tmp_path / "again/outputs/checkpoint/step-6/manifest.json").exists()


@pytest.mark.filterwarnings("ignore")  # torchtitan's own, at import
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"preset": "async_persistant"}, "Did you mean .*async_persistent"),
        ({"overrides": ["checkpoint.writer.worker=2"]}, r"Did you mean checkpoint.writer.workers=2\?"),
        ({"overrides": ["checkpoint.keep.last=1"]}, "has no effect here; use --checkpoint.keep_latest_k"),
        ({"overrides": "checkpoint.writer.workers=2"}, "overrides must be a list"),
    ],
)
def test_a_typo_is_refused_before_training(wrong: dict[str, Any], text: str, tmp_path: Path) -> None:
    from ckpt_component.integrations.torchtitan import TorchTitanCheckpointManager

    config = TorchTitanCheckpointManager.Config(enable=True, **wrong)
    parts: dict[str, Any] = {
        "dataloader": None,
        "model_parts": [],
        "optimizers": None,
        "lr_schedulers": None,
        "sd_adapter": None,
    }
    with pytest.raises(CheckpointConfigError, match=text):
        config.build(**parts, states={}, base_folder=str(tmp_path))
