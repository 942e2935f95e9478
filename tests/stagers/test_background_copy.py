"""A copy beside training: whatever becomes of it, nothing is torn or left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from strides import in_turn

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    build_checkpointer,
)
from ckpt_component.core.image.copy import CopyTasks
from ckpt_component.saving.pipeline import SavePipeline
from ckpt_component.testing import faults

#: A copy does its first tasks, and never all of them, in this time.
FIRST_SECONDS = 0.003
#: So many tasks of a copy.
STATE = {f"weight{number}": torch.full((8 << 20,), number, dtype=torch.uint8) for number in range(8)}


class Held:
    """Copies beside training stop after their first tasks, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.error: BaseException | None = None
        drain = CopyTasks.drain

        def held_drain(tasks: CopyTasks, until: float = math.inf, threads: int = 1) -> None:
            if threading.current_thread().name.startswith("ckpt-stage"):
                drain(tasks, time.monotonic() + FIRST_SECONDS)
                assert self.go.wait(60)
                if self.error is not None:
                    raise self.error
            drain(tasks, until, threads)

        monkeypatch.setattr(CopyTasks, "drain", held_drain)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()


def build(*overrides: str) -> AsyncCheckpointer:
    built = build_checkpointer("async_zero_overhead", ["checkpoint.writer.block_bytes=1048576", *overrides])
    assert isinstance(built, AsyncCheckpointer)
    return built


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """A process that is being killed may have no command line any more, and still run."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "io"), in_turn([("persistent", "buffered"), ("temporal", "direct"), ("persistent", "direct")], 3)
)
def test_the_files_are_those_of_an_awaited_copy(caller: str, io: str, tmp_path: Path) -> None:
    with build(f"checkpoint/caller={caller}", f"checkpoint.writer.io={io}") as ours:
        for name in ("one", "two"):
            ours.save(STATE, tmp_path / name)[1].result(30)
        loaded = ours.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    with build_checkpointer("sync") as plain:
        plain.save(STATE, tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")


def test_a_copy_that_fails_fails_its_save_and_no_other(held: Held, tmp_path: Path) -> None:
    held.error = CheckpointError("no such memory")
    with build("checkpoint.stager.arenas=1") as ours:
        staged, write = ours.save(STATE, tmp_path / "one")
        held.go.set()
        for future in (staged, write):
            with pytest.raises(CheckpointError, match="no such memory"):
                future.result(10)
        held.error = None
        ours.save(STATE, tmp_path / "two")[1].result(30)
    assert os.listdir(tmp_path) == ["two"]


def test_a_writer_process_that_dies_during_the_copy_is_started_again(held: Held, tmp_path: Path) -> None:
    with build() as ours:
        (writer,) = faults.writers()
        staged, write = ours.save(STATE, tmp_path / "one")
        os.kill(writer, signal.SIGKILL)
        eventually(lambda: has_ended(writer))
        assert not staged.done()
        held.go.set()
        write.result(30)
        assert faults.writers() not in ([], [writer])
        loaded = ours.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())


def test_a_save_that_cannot_begin_fails_before_the_copy_has_ended(held: Held, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with build("checkpoint.stager.arenas=1") as ours:
        staged, write = ours.save(STATE, tmp_path / "file" / "one")
        with pytest.raises(CheckpointSaveError):
            write.result(10)
        assert not staged.done() and ours.busy
        held.go.set()
        ours.save(STATE, tmp_path / "two")[1].result(30)


@pytest.mark.slow
def test_a_copy_that_does_not_end_fails_at_its_deadline(held: Held, tmp_path: Path) -> None:
    with build("checkpoint.timeouts.stage=0.5") as ours:
        before = faults.writers()
        staged, write = ours.save(STATE, tmp_path / "one")
        with pytest.raises(CheckpointTimeoutError, match=r"not complete after 0\.5 s \(timeouts\.stage\)"):
            write.result(10)
        assert not staged.done() and not os.listdir(tmp_path)
        held.go.set()
        ours.save(STATE, tmp_path / "two")[1].result(30)
        assert faults.writers() == before


KILLED = """
    import os, signal, sys, threading, time
    import torch
    from ckpt_component import build_checkpointer
    from ckpt_component.core.image.copy import CopyTasks
    from ckpt_component.testing import faults

    drain = CopyTasks.drain

    def part(tasks, *until):
        if not threading.current_thread().name.startswith("ckpt-stage"):
            return drain(tasks, *until)
        drain(tasks, time.monotonic() + 0.003)
        time.sleep(0.2)
        print(faults.writers()[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with build_checkpointer("async_zero_overhead", ["checkpoint.writer.block_bytes=1048576"]) as ours:
        state = {f"weight{n}": torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(8)}
        ours.save(state, sys.argv[1] + "/before")[1].result(60)
        CopyTasks.drain = part
        ours.save(state, sys.argv[1] + "/one")
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_trainer_killed_in_mid_copy_leaves_nothing_visible_and_no_writer(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(KILLED))
    run = tmp_path / "run"
    run.mkdir()
    began = time.monotonic()
    ended = subprocess.Popen([sys.executable, script, run], stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    writer = int(ended.stdout.readline())
    assert ended.wait(60) == -signal.SIGKILL
    eventually(lambda: not psutil.pid_exists(writer) or psutil.Process(writer).status() == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - began < 60
    assert (run / "before").exists() and not (run / "one").exists()
    ended.stdout.close()
    with build() as ours:
        ours.save(STATE, run / "one")[1].result(30)
        assert torch.equal(ours.load(run / "one")["weight3"], STATE["weight3"])


@pytest.mark.slow
def test_every_block_is_written_once(tmp_path: Path) -> None:
    with build("checkpoint.writer.io=buffered") as ours:
        assert isinstance(ours.saver, SavePipeline)
        caller = ours.saver.caller
        before = caller.progress()
        report = ours.save(STATE, tmp_path / "one")[1].result(30)
        wrote = caller.progress() - before
    assert report.bytes <= wrote < report.bytes + (1 << 20)
