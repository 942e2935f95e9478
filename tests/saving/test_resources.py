"""What a save takes from training: priority, memory, threads, and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.testing import faults

MB = 1_000_000


@pytest.mark.parametrize("caller", ["persistent", "temporal"])
@pytest.mark.parametrize(
    ("overrides", "nice", "io"),
    [
        ((), 10, (psutil.IOPRIO_CLASS_BE, 7)),
        (("checkpoint.caller.nice=3", "checkpoint.caller.io_priority=idle"), 3, (psutil.IOPRIO_CLASS_IDLE, 0)),
    ],
)
def test_the_writer_process_runs_at_its_priority(
    caller: str, overrides: tuple[str, ...], nice: int, io: tuple[int, int], tmp_path: Path
) -> None:
    with build_checkpointer("async_persistent", [f"checkpoint/caller={caller}", *overrides]) as checkpointer:
        with faults.at("write").holds() as held:
            checkpointer.save({"step": 1}, tmp_path / "one")
            held.wait()
            writer = psutil.Process(faults.writers()[0])
            assert writer.nice() == max(nice, psutil.Process().nice())
            assert tuple(writer.ionice()) == io
        checkpointer.wait()


def test_the_writer_process_is_small_beside_the_image() -> None:
    with build_checkpointer("async_persistent"):
        (pid,) = faults.writers()
        assert psutil.Process(pid).memory_info().rss < 30 * MB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "copies"), [("sync", 0), ("async_persistent", 1), ("async_temporal", 1), ("async_zero_overhead", 2)]
)
def test_host_memory_is_so_many_copies_of_the_state(preset: str, copies: int, tmp_path: Path) -> None:
    state = {"weight": torch.ones(16 << 20, dtype=torch.uint8)}
    with build_manager(preset, ["checkpoint.save.at_end=false"], dir=tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
            manager.wait_staged()
        manager.wait()
    assert [report.host_memory_bytes for report in manager.reports][-1] == pytest.approx(copies * (16 << 20), rel=0.01)


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
def test_writers_write_with_as_many_threads_as_they_have_workers(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, at_once, met = FileStorage.write, threading.Barrier(3), set[int]()

    def wait_for_others(self: FileStorage, fd: int, buffers: Sequence[memoryview], *more: Any) -> Any:
        """The first large write of each thread waits for those of the others."""
        if threading.get_ident() not in met and sum(buffer.nbytes for buffer in buffers) > MB // 2:
            met.add(threading.get_ident())
            at_once.wait(20)
        return write(self, fd, buffers, *more)

    overrides = [f"checkpoint/writer={writer}", "checkpoint.writer.workers=3"]
    with build_checkpointer("sync", overrides) as checkpointer, monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", wait_for_others)
        checkpointer.save({f"weight{number}": torch.ones(MB) for number in range(6)}, tmp_path / "one")
    assert len(met) == 3


@pytest.mark.slow
def test_the_stall_of_a_save_is_about_one_copy_of_the_state(tmp_path: Path) -> None:
    """In one of several pairs, because other work on the machine makes single ones long."""
    state = {f"weight{number}": torch.ones(16 * MB, dtype=torch.uint8) for number in range(4)}
    target = {key: torch.empty_like(value) for key, value in state.items()}
    copies, stalls = list[float](), list[float]()
    overrides = ["checkpoint.save.at_end=false", "checkpoint.durability=process_crash"]
    with build_manager("async_persistent", overrides, dir=tmp_path) as manager:
        manager.prewarm(state)
        for step in range(1, 7):
            begun = time.perf_counter()
            for key, value in state.items():
                target[key].copy_(value)
            copies.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            manager.save(step, state)
            stalls.append(time.perf_counter() - begun)
            manager.wait()
    pairs = [*zip(stalls, copies, strict=True)][1:]  # the first copy touches new memory
    assert any(stall < 3 * copy + 0.01 for stall, copy in pairs), pairs
