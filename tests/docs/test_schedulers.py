"""The batch scripts of docs/schedulers.md requeue a job that was warned, and no other. Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckpt_component

pytestmark = pytest.mark.slow

REPOSITORY = Path(ckpt_component.__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "schedulers.md").read_text()
SCRIPTS = {
    "torchrun" if "torchrun" in code else "srun": code
    for code in re.findall(r"^```bash[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    if "#SBATCH" in code
}
TRAIN = """
import os, pathlib, time
from ckpt_component import build_manager
state = {"step": 0}
with build_manager("async_persistent", dir="runs/schedulers") as manager:
    manager.stop_on_signal()
    for step in range((manager.restore(state) or 0) + 1, 1000):
        time.sleep(0.05)
        state["step"] = step
        manager.maybe_save(step, state)
        if step == 3:
            pathlib.Path("pid").write_text(str(os.getpid()))
        if manager.should_stop() or pathlib.Path("finish").exists():
            break
manager.exit_if_stopped()
"""
#: The options of the real ones are skipped, and what is left is run in their place.
STANDS_IN = '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
COMMANDS = {
    "srun": STANDS_IN + 'export SLURM_PROCID=0 SLURM_LOCALID=0\nexec "$@"\n',
    "torchrun": STANDS_IN + 'exec python "$@"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi\n',
    "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", [pytest.param("srun", marks=pytest.mark.soak), "torchrun"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 85), (signal.SIGTERM, 143), (None, 0)])
def test_a_job_that_was_warned_is_queued_again(
    tmp_path: Path, name: str, number: signal.Signals | None, code: int
) -> None:
    (tmp_path / "bin").mkdir()
    for command, text in COMMANDS.items():
        (tmp_path / "bin" / command).write_text(text)
        (tmp_path / "bin" / command).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(SCRIPTS[name])
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    env |= {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, start_new_session=True)
    try:
        pid = tmp_path / "pid"
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        if number is None:
            (tmp_path / "finish").touch()
        else:
            # --signal=USR1@120 reaches the steps, --signal=B:USR1@120 the shell; here SIGTERM always is the steps'.
            os.kill(job.pid if name == "torchrun" and number is signal.SIGUSR1 else int(pid.read_text()), number)
        job.wait(60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(30)
    # What torchrun gets from the shell is a SIGTERM.
    assert job.returncode == (143 if name == "torchrun" and number is signal.SIGUSR1 else code)
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 77\n" if number is signal.SIGUSR1 else "")
