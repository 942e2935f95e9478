"""Writing begins while the snapshot is still being taken; whatever becomes of either, nothing is torn or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    TornSnapshotError,
    WorkerDiedError,
    build_checkpointer,
)
from ckpt_component.image.copy import Portions

#: So many portions of a copy.
STATE = {f"weight{number}": torch.full((8 << 20,), number, dtype=torch.uint8) for number in range(8)}


class Held:
    """Copies beside training stop after some portions, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, portions: int = 4) -> None:
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.holds = True
        drain = Portions.drain

        def wait(portion: Callable[[], object]) -> None:
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error
            portion()

        def held_drain(copy: Portions, *until: float) -> None:
            if self.holds and threading.current_thread().name.startswith("ckpt-stage") and len(copy._work) > portions:
                number, portion = copy._work[portions]
                copy._work[portions] = number, partial(wait, portion)
            drain(copy, *until)

        monkeypatch.setattr(Portions, "drain", held_drain)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()


def build(*overrides: str) -> AsyncCheckpointer:
    built = build_checkpointer("async_zero_overhead", ["checkpoint.writer.block_bytes=1048576", *overrides])
    assert isinstance(built, AsyncCheckpointer)
    return built


def written(checkpointer: AsyncCheckpointer) -> int:
    """By the process that writes; files may be preallocated."""
    return int(checkpointer.saver.caller.progress())


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("caller", ["persistent", "temporal"])
def test_what_is_copied_is_written_before_the_rest_is(caller: str, io: str, held: Held, tmp_path: Path) -> None:
    with build(f"checkpoint/caller={caller}", f"checkpoint.writer.io={io}") as ours:
        staged, write = ours.save(STATE, tmp_path / "one")
        eventually(lambda: written(ours) > (16 << 20))
        time.sleep(0.2)
        assert written(ours) < (40 << 20) and not staged.done()
        held.go.set()
        write.result(30)
        held.holds = False
        ours.save(STATE, tmp_path / "two")[1].result(30)
        assert contents(tmp_path / "one") == contents(tmp_path / "two")
        loaded = ours.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    with build_checkpointer("sync") as plain:
        plain.save(STATE, tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_format_can_be_written_so(writer: str, workers: int, tmp_path: Path) -> None:
    state = {**STATE, "odd": torch.arange(300_000).reshape(300, 1000).t(), "none": torch.empty(0)}
    state.update({f"small{number}": torch.full((number,), float(number)) for number in range(50)})
    with build(f"checkpoint/writer={writer}", f"checkpoint.writer.workers={workers}") as ours:
        for number in range(3):
            ours.save(state, tmp_path / str(number))[1].result(30)
        loaded = ours.load(tmp_path / "2")
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_copy_that_fails_fails_its_save_and_no_other(held: Held, tmp_path: Path) -> None:
    held.error = CheckpointError("no such memory")
    with build("checkpoint.stager.arenas=1") as ours:
        staged, write = ours.save(STATE, tmp_path / "one")
        eventually(lambda: written(ours) > (16 << 20))
        held.go.set()
        for future in (staged, write):
            with pytest.raises(CheckpointError, match="no such memory"):
                future.result(10)
        held.holds = False
        ours.save(STATE, tmp_path / "two")[1].result(30)
    assert os.listdir(tmp_path) == ["two"]


def test_a_tensor_that_changed_is_found_when_everything_else_is_written(held: Held, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in STATE.items()}
    with build() as ours:
        _, write = ours.save(state, tmp_path / "one")
        eventually(lambda: written(ours) > (16 << 20))
        state["weight7"].add_(1)
        held.go.set()
        with pytest.raises(TornSnapshotError, match="'weight7' changed"):
            write.result(10)
    assert os.listdir(tmp_path) == []


def test_a_worker_that_dies_meanwhile_fails_its_save_at_once(held: Held, tmp_path: Path) -> None:
    with build() as ours:
        pid = ours.saver.caller.pid
        staged, write = ours.save(STATE, tmp_path / "one")
        eventually(lambda: written(ours) > (16 << 20))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            write.result(10)
        assert not staged.done()
        held.go.set()
        held.holds = False
        ours.save(STATE, tmp_path / "two")[1].result(30)
    assert os.listdir(tmp_path) == ["two"]


def test_a_retry_follows_the_copy_anew(held: Held, tmp_path: Path) -> None:
    retry = ("checkpoint.on_error=retry", "checkpoint.retry.attempts=2", "checkpoint.retry.backoff_seconds=0.01")
    with build(*retry) as ours:
        caller = ours.saver.caller
        pid = caller.pid
        _, write = ours.save(STATE, tmp_path / "one")
        eventually(lambda: written(ours) > (16 << 20))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: caller.pid not in (None, pid) and written(ours) > (16 << 20))
        held.go.set()
        assert write.result(30).attempts == 2
        loaded = ours.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())


def test_a_write_that_fails_is_told_before_the_copy_has_ended(held: Held, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with build("checkpoint.stager.arenas=1") as ours:
        staged, write = ours.save(STATE, tmp_path / "file" / "one")
        with pytest.raises(CheckpointSaveError):
            write.result(10)
        assert not staged.done() and ours.busy
        held.go.set()
        held.holds = False
        ours.save(STATE, tmp_path / "two")[1].result(30)


def test_a_copy_that_does_not_end_is_told_by_its_deadline(held: Held, tmp_path: Path) -> None:
    with build("checkpoint.timeouts.stage=0.5") as ours:
        pid = ours.saver.caller.pid
        staged, write = ours.save(STATE, tmp_path / "one")
        with pytest.raises(CheckpointTimeoutError, match=r"not complete after 0\.5 s \(timeouts\.stage\)"):
            write.result(10)
        assert not staged.done() and not os.listdir(tmp_path)
        held.go.set()
        held.holds = False
        ours.save(STATE, tmp_path / "two")[1].result(30)
        assert ours.saver.caller.pid == pid


KILLED = """
    import os, signal, sys, threading, time
    import torch
    from ckpt_component import build_checkpointer
    from ckpt_component.image.copy import Portions

    drain = Portions.drain

    def part(copy, *until):
        if not threading.current_thread().name.startswith("ckpt-stage"):
            return drain(copy, *until)
        while len(copy._work) > 4:
            copy._work.pop()
        drain(copy, *until)
        forked = os.fork() if sys.argv[2] == "forked" else None
        if forked == 0:  # has the pipe open, as a data loader's process would
            time.sleep(20)
            os._exit(0)
        while ours.saver.caller.progress() < 16 << 20:
            time.sleep(0.01)
        print(ours.saver.caller.pid, *[forked] * (forked is not None), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with build_checkpointer("async_zero_overhead", ["checkpoint.writer.block_bytes=1048576"]) as ours:
        state = {f"weight{n}": torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(8)}
        Portions.drain = part
        ours.save(state, sys.argv[1] + "/one")
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_row_05_a_trainer_killed_in_mid_copy_leaves_nothing_visible_and_no_writer(how: str, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(KILLED))
    run = tmp_path / "run"
    run.mkdir()
    began = time.monotonic()
    ended = subprocess.Popen([sys.executable, script, run, how], stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    writer, *forked = map(int, ended.stdout.readline().split())
    assert ended.wait(60) == -signal.SIGKILL
    eventually(lambda: not psutil.pid_exists(writer) or psutil.Process(writer).status() == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - began < 60
    assert not (run / "one").exists()
    for pid in forked:
        os.kill(pid, signal.SIGKILL)
    ended.stdout.close()
    with build() as ours:
        ours.save(STATE, run / "one")[1].result(30)
        assert torch.equal(ours.load(run / "one")["weight3"], STATE["weight3"])


def test_every_block_is_written_once(tmp_path: Path) -> None:
    with build("checkpoint.writer.io=buffered") as ours:
        before = written(ours)
        report = ours.save(STATE, tmp_path / "one")[1].result(30)
        wrote = written(ours) - before
    assert report.bytes <= wrote < report.bytes + (1 << 20)
