"""The torch-free writer process: what it imports, what it costs to start, and how its death is told."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointSaveError, WorkerDiedError, build_checkpointer
from ckpt_component.core.writing.process import ByteProcess

ROOT = Path(__file__).resolve().parents[2]


def test_the_worker_imports_neither_torch_nor_anything_installed() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ckpt_component.core.writing.worker; "
        "foreign = [name for name in sys.modules if name.split('.')[0] not in sys.stdlib_module_names]; "
        "print(sorted({name.split('.')[0] for name in foreign}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60, check=True
    )
    assert {*ast.literal_eval(done.stdout)} - {"__main__"} == {"ckpt_component"}


def test_its_start_imports_few_modules() -> None:
    """Its start is the imports: about 150 modules, two thirds of them of Python itself."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ckpt_component.core.writing.worker; print(len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 180


def test_a_killed_worker_is_reported_at_once_with_its_signal() -> None:
    process = ByteProcess(30)
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        process.receive(time.monotonic() + 30, "timeouts.write")
    assert time.monotonic() - started < 5  # far below the deadline of 30 s
    process.close(1)


def test_ctrl_c_and_sigterm_to_the_group_do_not_end_it() -> None:
    process = ByteProcess(30)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process.pid, number)
        process.send({"kind": "decided"}, time.monotonic() + 5)
        assert process.alive
    finally:
        process.close(5)
    assert not process.alive


def test_a_frame_of_an_unknown_kind_fails_the_save_that_is_under_way_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_checkpointer("async_persistent") as checkpointer:
        send = ByteProcess.send

        def send_more(process: ByteProcess, header: dict[str, Any], *arguments: Any, **options: Any) -> None:
            if header["kind"] == "write":
                send(process, {"kind": "wirte"}, time.monotonic() + 5)
            send(process, header, *arguments, **options)

        state = {"weight": torch.ones(3)}
        with monkeypatch.context() as patch:
            patch.setattr(ByteProcess, "send", send_more)
            with pytest.raises(CheckpointSaveError, match="frame of the unknown kind 'wirte'"):
                checkpointer.save(state, tmp_path / "one")[1].result(30)  # type: ignore[index]
        checkpointer.save(state, tmp_path / "two")[1].result(30)  # type: ignore[index]
    assert os.listdir(tmp_path) == ["two"]


@pytest.mark.parametrize("answer", [{"kind": "doen", "id": 0}, {"kind": "done", "id": 7, "result": {}}])
def test_an_answer_that_was_not_asked_for_fails_the_save(
    answer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_checkpointer("async_persistent") as checkpointer:
        state = {"weight": torch.ones(3)}
        with monkeypatch.context() as patch:
            patch.setattr(ByteProcess, "receive", lambda process, deadline, key: answer)
            with pytest.raises(CheckpointSaveError, match=f"answered request 0 with a frame '{answer['kind']}'"):
                checkpointer.save(state, tmp_path / "one")[1].result(30)  # type: ignore[index]
        checkpointer.save(state, tmp_path / "two")[1].result(30)  # type: ignore[index]
    assert os.listdir(tmp_path) == ["two"]


def test_close_twice_and_after_death() -> None:
    process = ByteProcess(30)
    process.close(5)
    process.close(5)
    assert not process.alive
