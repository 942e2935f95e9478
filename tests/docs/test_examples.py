"""The examples run as their first lines say, again and on other numbers of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import run_on_ranks, run_program
from waiting import eventually

import ckpt_component
from ckpt_component import build_checkpointer

REPOSITORY = Path(ckpt_component.__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"


def run(name: str, folder: Path, *words: str) -> str:
    done = run_program([str(EXAMPLES / name), *words], folder)
    return output_of(done)


def output_of(*runs: subprocess.CompletedProcess[str]) -> str:
    for done in runs:
        assert done.returncode == 0, "\n".join(each.stdout for each in runs)
    return runs[0].stdout


def test_they_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name


@pytest.mark.slow
def test_a_loop_resumes_and_its_result_is_evaluated(tmp_path: Path) -> None:
    assert "step 200: loss" in run("loop.py", tmp_path)
    whole = run("evaluate.py", tmp_path)
    for step in (150, 200):
        shutil.rmtree(tmp_path / "runs" / "loop" / f"iter_0000{step}")
    assert "restored step 100" in run("loop.py", tmp_path)
    assert run("evaluate.py", tmp_path) == whole and whole.startswith("step 200: loss")


@pytest.mark.slow
def test_a_hydra_app_takes_the_keys_of_a_preset(tmp_path: Path) -> None:
    app = tmp_path / "hydra_app"
    shutil.copytree(EXAMPLES / "hydra_app", app)
    done = run_program(["hydra_app/app.py", "checkpoint=sync", "checkpoint.save.every_steps=30"], tmp_path)
    assert "steps 1 to 60, checkpoints [30, 60]" in output_of(done)
    sweep = run_program(["hydra_app/app.py", "-m", "checkpoint.writer.workers=1,2"], tmp_path)
    assert output_of(sweep).count("steps 1 to 60, checkpoints [20, 40, 60]") == 2


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_process_writes_with_the_published_weights(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "publish.py")]
    env = {**os.environ, "CKPT_RUNTIME_DIR": str(tmp_path / "sockets"), "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen([*program, "write"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as writer:
        trained = subprocess.run(
            program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
        )
        told, _ = writer.communicate(timeout=150)
    assert trained.returncode == 0 == writer.returncode, trained.stderr
    steps = [int(step) for step in re.findall(r"^step (\d+): ", told, re.MULTILINE)]
    assert steps == sorted({*steps}) and steps[-1] == 300  # a busy machine may show no version before the last


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.8", reason="FSDP2 of torch 2.7 sums gradients over gloo")
def test_fsdp_goes_from_two_ranks_to_one_and_to_four(tmp_path: Path) -> None:
    script, folder = str(EXAMPLES / "fsdp.py"), tmp_path / "runs" / "fsdp"
    first = output_of(*run_on_ranks([script, "--steps=50"], tmp_path, 2))
    assert "steps 1 to 50 on 2 ranks: loss" in first
    shutil.copytree(folder, tmp_path / "copy")
    endings = []
    for ranks in (1, 4):
        told = output_of(*run_on_ranks([script, "--steps=60"], tmp_path, ranks))
        assert f"steps 51 to 60 on {ranks} ranks: loss" in told
        with build_checkpointer("sync") as checkpointer:
            endings.append(checkpointer.load(folder / "iter_0000060"))
        if ranks == 1:
            assert "nothing was trained" in output_of(*run_on_ranks([script, "--steps=60"], tmp_path, 1))
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy", folder)
    for name, weight in endings[0]["model"].items():
        torch.testing.assert_close(endings[1]["model"][name], weight)


@pytest.mark.slow
def test_ddp_with_mixed_precision_and_an_average_resumes(tmp_path: Path) -> None:
    script, folder = str(EXAMPLES / "ddp.py"), tmp_path / "runs" / "ddp"
    whole = output_of(*run_on_ranks([script], tmp_path, 2))
    shutil.rmtree(folder / "iter_0000060")
    again = output_of(*run_on_ranks([script], tmp_path, 2))
    [loss] = re.findall(r"steps 1 to 60: (loss [\d.]+)", whole)
    assert f"steps 41 to 60: {loss}" in again
    assert "nothing was trained" in output_of(*run_on_ranks([script], tmp_path, 1))


def hosts_of(folder: Path) -> list[int]:
    """The processes that examples/hosts.sh has started in a folder and not ended."""
    mark = f"CKPT_RUNTIME_DIR={folder}/sockets".encode()
    found = list[int]()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def start_hosts(folder: Path, *words: str) -> subprocess.Popen[str]:
    script, env = [str(EXAMPLES / "hosts.sh"), str(folder), *words], {**os.environ, "PYTHON": sys.executable}
    return subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_host_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    job = start_hosts(tmp_path / "job")
    told, _ = job.communicate(timeout=580)
    assert job.returncode == 0, told
    steps = re.findall(r"^(node\d): step (\d+) from (memory, also that of other hosts|disk)$", told, re.MULTILINE)
    assert [host for host, *_ in steps] == ["node0", "node2", "node3", "node4"] * 2
    assert {place for *_, place in steps[:4]} == {"memory, also that of other hosts"}, "node4 has it from node3"
    assert re.search(r"^ +1  node1 .*  rank 3's$", told, re.MULTILINE), "node3 has the copies of node1's rank"
    assert {place for *_, place in steps[4:]} == {"disk"}, "memory is lost, and the disks are not"
    assert len({step for _, step, _ in steps}) == 2
    assert "part: its files are on node0, node2, node3, node4" in told
    assert re.search(r"^ +\d+ .* 4  committed, newest$", told, re.MULTILINE), "the hosts have uploaded their files"
    assert "Killed" not in told and hosts_of(tmp_path / "job") == []
    again = start_hosts(tmp_path / "job")
    refused, _ = again.communicate(timeout=30)
    assert again.returncode == 2 and refused.endswith("has a run already; name a new folder\n")


@pytest.mark.soak
def test_ctrl_c_ends_all_hosts(tmp_path: Path) -> None:
    job = start_hosts(tmp_path / "job")
    eventually(lambda: len(hosts_of(tmp_path / "job")) >= 4, 60)
    job.send_signal(signal.SIGINT)
    told, _ = job.communicate(timeout=30)
    assert job.returncode == 130, told
    assert hosts_of(tmp_path / "job") == []


def python_of(page: str) -> str:
    """The blocks of a page that run, one after the other."""
    text = (REPOSITORY / "docs" / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_a_whole_training_state_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(python_of("training.md"))
    whole = output_of(run_program(["training.py"], tmp_path))
    shutil.rmtree(tmp_path / "runs")
    assert "step 60: " in output_of(run_program(["training.py"], tmp_path, {"STEPS": "60"}))
    again = output_of(run_program(["training.py"], tmp_path))
    assert "\nstep 100: loss" in whole and again.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.turns(3)
@pytest.mark.slow
def test_old_checkpoints_are_imported_as_the_page_says(tmp_path: Path) -> None:
    blocks = python_of("migration.md")
    (tmp_path / "before.py").write_text(blocks)
    output_of(run_program(["before.py"], tmp_path))
    imports = re.findall(
        r"\bckpt (import old\S+ runs/migrated --step 100)\b", (REPOSITORY / "docs/migration.md").read_text()
    )
    assert {line.split()[1] for line in imports} == {"old.pt", "old/step_100"}
    manager, _, _ = blocks.partition("import torch.distributed")
    (tmp_path / "after.py").write_text(manager + "print(start, manager.steps())")
    for line in imports:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        output_of(run_program(["-m", "ckpt_component.cli", *line.split()], tmp_path))
        assert output_of(run_program(["after.py"], tmp_path)).splitlines()[-1] == "100 [100, 150, 200]"
