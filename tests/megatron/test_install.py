"""`ckpt_component.megatron.install()` and `python -m ckpt_component.megatron`, without Megatron: see `hooks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program
from ranks import run_ranks

HOOKS = Path(__file__).with_name("hooks.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        "before",
        "after",
        "with_nvrx_before",
        "with_nvrx_after",
        "unknown_names",
        "unknown_names_after",
        "another_structure",
    ],
)
def test_names_are_in_place(function: str, tmp_path: Path) -> None:
    run_ranks(HOOKS, function, 1, tmp_path)


@pytest.mark.slow
def test_options_of_megatron_reach_queue_process_and_writer(tmp_path: Path) -> None:
    (output,) = run_ranks(HOOKS, "options", 1, tmp_path)
    assert "checkpoint.keep.last=3 has no effect in Megatron's training loop" in output
    assert "There is no key checkpoint.timeout" in output


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "ckpt_component.megatron", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_script_runs_as_it_would_alone(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "scripts/pretrain.py"
    script.write_text(
        "import pickle, sys, neighbour\n"
        "class Data: pass\n"
        "if __name__ == '__main__':\n"
        "    assert pickle.loads(pickle.dumps(Data())).__class__ is Data and neighbour.VALUE == 7\n"
        "    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue\n"
        "    print(AsyncCallsQueue.__mro__[1].__module__, sys.argv[1:], __file__)\n"
        "    raise SystemExit(3)\n"
    )
    options = ["--save", "there", "--checkpoint-override", "of the script"]
    done = launch("--checkpoint-override", "checkpoint.timeouts.write=1h", str(script), *options, cwd=tmp_path)
    assert done.stdout == f"ckpt_component.compat.async_queue {options} {script}\n", done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pretrain_gtp.py", "--save", "x"], "there is no script 'pretrain_gtp.py'"),
        (["--save", "x", "real.py"], "unrecognized arguments: --save"),
        ([], "the following arguments are required: script"),
        (
            ["--checkpoint-override", "checkpoint.timeouts.wite=1", "real.py"],
            "There is no key checkpoint.timeouts.wite",
        ),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("print('ran')\n")
    done = run_program(["-m", "ckpt_component.megatron", *arguments], tmp_path, apart=True)
    assert done.returncode == 2 and not done.stdout
    assert text in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
