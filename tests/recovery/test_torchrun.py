"""torchrun restarts the ranks of a run whose snapshots are in memory, as the docs advise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from snapshots import live

SCRIPTS, TESTS = Path(__file__).parent / "scripts", Path(__file__).parents[1]
RANKS, STEPS = 3, 10


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_resume_from_memory_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    straight = live(tmp_path / "straight", world_size=RANKS, steps=STEPS)
    folder = tmp_path / "killed"
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["--max-restarts=3", f"--log-dir={tmp_path}", str(SCRIPTS / "restarted.py"), str(folder)]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Without the variable the ranks cannot connect again, see docs/schedulers.md.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(TESTS), str(TESTS / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        left = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for process in left:
            process.kill()
        job.kill()
    assert job.returncode == 0, output
    for rank, life in enumerate(straight):
        starts = [
            [json.loads(line) for line in (folder / f"start{start}-{rank}").read_text().splitlines()]
            for start in range(3)
        ]
        assert [start[0] for start in starts] == [[None, None], [4, "memory"], [7, "memory"]]
        losses = [loss for start in starts for _, loss in start[1:]]
        assert [step for start in starts for step, _ in start[1:]] == [*range(1, STEPS + 1)]
        assert losses == [*life.told["losses"].values()]
