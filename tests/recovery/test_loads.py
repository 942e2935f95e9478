"""Who loads beside a run that lives takes what its servers have, and that stays as it is until he has read it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import MEMORY, client_of, in_memory, kill, paused
from waiting import eventually

from ckpt_component import CheckpointListener, LoadReport, build_checkpointer, build_manager, load_weights
from ckpt_component.core.image.arena import Arena
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.stores import LocalFile

QUIET = [*MEMORY, "checkpoint.save.every_steps=100", "checkpoint.save.at_end=false"]
READER = ["checkpoint/recovery=host"]


class Source(CheckpointListener):
    """Where the last restore was from."""

    source: str | None = None

    def on_restored(self, report: LoadReport) -> None:
        self.source = report.source


def weight(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


def spoil(path: str | Path) -> None:
    """Who reads the data of a checkpoint on the disk fails from now on."""
    for file in Path(path).glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


def restored(folder: Path, state: dict[str, Any]) -> tuple[int | None, str | None]:
    """What a run in another process of this user begins with, and from where; it saves nothing."""
    source = Source()
    only = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false", "checkpoint.recovery.every_steps=null"]
    with build_manager("async_persistent", [*READER, *only], dir=folder) as manager:
        manager.add_listener(source)
        step = manager.restore(state)
        manager.wait()
    return step, source.source


def test_the_trainer_itself_loads_what_it_has_saved_from_memory(tmp_path: Path) -> None:
    source = Source()
    with build_manager("async_persistent", QUIET, dir=tmp_path / "run") as manager:
        manager.add_listener(source)
        manager.save(1, weight(1))
        manager.wait()
        path = manager.path_of(1)
        eventually(lambda: in_memory(path))
        spoil(path)
        loaded, state = weight(0), weight(0)
        assert load_weights(loaded, path, key="") == 1 and loaded["weight"].equal(weight(1)["weight"])
        assert manager.restore(state) == 1 and state["weight"].equal(weight(1)["weight"])
        manager.maybe_save(2, weight(2))
        manager.wait()
        assert manager.restore(state) == 2 and state["weight"].equal(weight(2)["weight"])
        manager.wait()
        assert source.source == "memory"


@pytest.mark.slow
def test_another_process_takes_bytes_from_a_run_that_lives_and_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "iter_0000003"
    with paused(tmp_path, steps=3, durable=[3], end="hang", state={"small": 2}) as lives:
        eventually(lambda: in_memory(path))
        spoil(path)
        for _ in range(2):
            small = {name: torch.zeros(4) for name in ("small0", "small1")}
            assert load_weights(small, path, key="small") == 3
            assert [value.tolist() for value in small.values()] == [[3.0] * 4, [4.0] * 4]
            state = {"small": {"small1": torch.zeros(4)}}
            with build_checkpointer("async_persistent", READER) as checkpointer:
                checkpointer.load(path, state)
                assert checkpointer.last_load is not None and checkpointer.last_load.source == "memory"
            assert state["small"]["small1"].tolist() == [4.0] * 4
            state["small"]["small1"].zero_()
            assert restored(tmp_path / "run", state) == (3, "memory")
            assert state["small"]["small1"].tolist() == [4.0] * 4
    assert [life.code for life in lives] == [0]


@contextmanager
def reading_memory(phase: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Inside the block the first look at an image waits: two events, that it does, and that it is to go on.

    Args:
        phase: "verifying", which looks at the bytes where they are, or "copying"
    """
    reached, go_on, preadv, view = threading.Event(), threading.Event(), os.preadv, LocalFile.view

    def wait() -> None:
        reached.set()
        assert go_on.wait(60)

    def read(fd: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
            wait()
        return preadv(fd, *rest)

    def look(piece: LocalFile, offset: int, length: int) -> memoryview | None:
        data = view(piece, offset, length)
        wait()
        return data

    with pytest.MonkeyPatch.context() as patch:
        if phase == "copying":
            patch.setattr(os, "preadv", read)
        else:
            patch.setattr(LocalFile, "view", look)
        try:
            yield reached, go_on
        finally:
            go_on.set()


@pytest.mark.parametrize("phase", ["verifying", "copying"])
@pytest.mark.parametrize("client", ["lives", "dies"])
def test_a_reader_has_the_bytes_that_it_began_with_while_training_goes_on(
    tmp_path: Path, phase: str, client: str
) -> None:
    with (
        build_manager("async_persistent", QUIET, dir=tmp_path / "run") as manager,
        build_checkpointer("async_persistent", READER) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        manager.save(1, weight(1))
        manager.wait()
        path, state = manager.path_of(1), weight(0)
        eventually(lambda: in_memory(path))
        with reading_memory(phase) as (reached, go_on):
            loading = pool.submit(reader.load, path, state)
            assert reached.wait(20)
            if client == "dies":
                kill(client_of(0))
            for step in range(2, 8):  # each image is filled again, if it may be
                manager.maybe_save(step, weight(step))
                manager.wait()
            go_on.set()
            loading.result(60)
        assert state["weight"].equal(weight(1)["weight"])
        assert reader.last_load is not None and reader.last_load.source == "memory"


@pytest.mark.slow
def test_readers_slower_than_snapshots_cost_the_run_no_new_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What publishes reads a snapshot for longer than it stays: its memory is filled again when it is done."""
    made = list[int]()

    class Counted(Arena):
        def __init__(self, nbytes: int, **options: Any) -> None:
            super().__init__(nbytes, **options)
            made.append(self.number)

    monkeypatch.setattr("ckpt_component.core.image.arena_pool.Arena", Counted)
    with build_manager("async_persistent", QUIET, dir=tmp_path / "run") as manager, ExitStack() as readers:
        for step in range(1, 25):
            manager.maybe_save(step, weight(step))
            manager.wait()
            if step % 3 == 1:  # for three snapshots
                readers.close()
                memory, path = HostMemory(), manager.reports[-1].path
                (data,) = (file.path for file in memory.files_below(path) if file.path.endswith(".distcp"))
                files = readers.enter_context(memory.open_files(os.path.dirname(data)))
                assert files.fill(os.path.basename(data), memoryview(bytearray(4)), 0)
    assert len(made) <= 4
