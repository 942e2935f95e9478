"""Direct and buffered writes give the same files; `auto` tries once, and falls back where there is no direct I/O."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from strides import in_turn

from ckpt_component import CheckpointConfigError, CheckpointSaveError, build_checkpointer
from ckpt_component.core.outside import OUTSIDE, Outside
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.writing import write_job
from ckpt_component.core.writing.range_writer import Throttle

STATE: dict[str, Any] = {
    "odd": torch.arange(12_345, dtype=torch.float32),
    "small": {str(number): torch.full((number,), float(number)) for number in range(50)},
    "none": torch.empty(0),
    "large": torch.arange(300_000, dtype=torch.int64),
}


def save(path: Path, preset: str, *overrides: str) -> None:
    settings = ["checkpoint/stager=shared_memory", *(f"checkpoint.writer.{each}" for each in overrides)]
    with build_checkpointer(preset, settings) as checkpointer:
        futures = checkpointer.save(STATE, path)
        if futures is not None:
            futures[1].result(60)


#: Every writer with each way in which bytes reach it.
WRITTEN = [
    (writer, *parts)
    for writer in ("dcp", "torch_save", "safetensors")
    for parts in (("sync", "none"), ("sync", "pinned"), ("async_persistent", "pinned"))
]


def data_files(path: Path) -> dict[str, bytes]:
    return {
        each.name: each.read_bytes()
        for each in path.iterdir()
        if each.suffix in (".distcp", ".pt", ".safetensors") or each.name.startswith("integrity")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "preset", "stager"), in_turn(WRITTEN, 2))
def test_direct_files_are_the_buffered_ones(writer: str, preset: str, stager: str, tmp_path: Path) -> None:
    for mode in ("direct", "buffered"):
        settings = [f"checkpoint/writer={writer}", f"checkpoint/stager={stager}", f"checkpoint.writer.io={mode}"]
        # Three writers, whose ranges begin and end anywhere in a page, and blocks that are no whole pages.
        settings += ["checkpoint.writer.workers=3", "checkpoint.writer.block_bytes=70000"]
        with build_checkpointer(preset, settings) as checkpointer:
            futures = checkpointer.save(STATE, tmp_path / mode)
            if futures is not None:
                futures[1].result(60)
            loaded = checkpointer.load(tmp_path / mode)
            assert torch.equal(loaded["large"], STATE["large"])
    direct, buffered = data_files(tmp_path / "direct"), data_files(tmp_path / "buffered")
    assert direct.keys() == buffered.keys() and len(direct) >= 2
    assert all(data == buffered[name] for name, data in direct.items())


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs."""
    if not (os.path.isdir("/dev/shm") and FileStorage().in_memory("/dev/shm")):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processors", "writer", "preset", "stager"),
    in_turn(((processors, *each) for processors, each in product([1, 64], WRITTEN)), 2),
)
def test_files_in_memory_are_those_on_the_disk(
    processors: int,
    writer: str,
    preset: str,
    stager: str,
    tmp_path: Path,
    in_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(processors)))  # the writer process asks itself
    settings = [f"checkpoint/writer={writer}", f"checkpoint/stager={stager}"]
    # Portions begin and end anywhere in items and blocks.
    settings += ["checkpoint.writer.workers=3", "checkpoint.writer.block_bytes=700001"]
    with build_checkpointer(preset, settings) as checkpointer:
        for path in (tmp_path / "buffered", in_memory / "saved"):
            futures = checkpointer.save(STATE, path)
            if futures is not None:
                futures[1].result(60)
        loaded = checkpointer.load(in_memory / "saved")
    assert torch.equal(loaded["large"], STATE["large"])
    memory, disk = data_files(in_memory / "saved"), data_files(tmp_path / "buffered")
    assert memory.keys() == disk.keys() and len(memory) >= 2
    assert all(data == disk[name] for name, data in memory.items())


def test_in_memory_nothing_is_tried(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_job, "SMALLEST", 1 << 20)
    monkeypatch.setattr(FileStorage, "open_direct", without_direct_io)
    made = list[str]()
    create = FileStorage.create

    def watched(fs: FileStorage, path: str, size: int = 0) -> int:
        made.append(path)
        return create(fs, path, size)

    monkeypatch.setattr(FileStorage, "create", watched)
    save(in_memory / "one", "sync", "io=auto")
    assert made and not any(".io-trial" in path for path in made)
    assert (in_memory / "one" / "manifest.json").exists()


def test_what_lies_in_memory_is_known(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FileStorage().in_memory(str(in_memory))
    assert not FileStorage().in_memory("/proc")

    def without_proc(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("/proc/self/mountinfo")

    monkeypatch.setattr("builtins.open", without_proc)
    assert not FileStorage().in_memory(str(in_memory))


def test_a_file_that_cannot_be_made_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = FileStorage.create, []

    def second_fails(fs: FileStorage, path: str, size: int = 0) -> int:
        if path.endswith("_1.distcp"):
            raise OSError(errno.EIO, "Input/output error", path)
        made.append(path)
        return create(fs, path, size)

    monkeypatch.setattr(FileStorage, "create", second_fails)
    with build_checkpointer("sync") as checkpointer:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            checkpointer.save(STATE, tmp_path / "one")
        assert any(path.endswith("_0.distcp") for path in made)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


def without_direct_io(fs: FileStorage, path: str) -> int:
    raise OSError(errno.EINVAL, "Invalid argument", path)


def test_direct_where_there_is_none_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStorage, "open_direct", without_direct_io)
    with pytest.raises(CheckpointSaveError, match=r"no direct I/O; use checkpoint\.writer\.io=auto"):
        save(tmp_path / "one", "sync", "io=direct")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("available", "found"), [(True, "direct"), (False, "buffered")])
def test_auto_tries_once(
    available: bool,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    tried = list[str]()
    opened = list[str]()
    seconds = 0.0  # as the trials see them: what this machine would say differs from run to run
    create, sync, open_direct = FileStorage.create, FileStorage.sync, FileStorage.open_direct

    def watched_create(fs: FileStorage, path: str, size: int = 0) -> int:
        if ".io-trial" in path:
            tried.append("buffered")
        return create(fs, path, size)

    def watched_open(fs: FileStorage, path: str) -> int:
        opened.append(path)
        if ".io-trial" in path:
            tried[-1] = "direct"
        return open_direct(fs, path) if available else without_direct_io(fs, path)

    def slow_sync(fs: FileStorage, fd: int) -> None:
        nonlocal seconds
        seconds += 1.0 if tried[-1:] == ["direct"] else 2.0
        sync(fs, fd)

    monkeypatch.setattr(write_job, "SMALLEST", 1 << 20)
    monkeypatch.setattr(write_job, "TRIED_BYTES", 1 << 20)
    outside = Outside()
    outside.now = lambda: OUTSIDE.now() + seconds
    monkeypatch.setattr(FileStorage, "create", watched_create)
    monkeypatch.setattr(FileStorage, "open_direct", watched_open)
    monkeypatch.setattr(FileStorage, "sync", slow_sync)
    monkeypatch.setattr(FileStorage, "in_memory", lambda fs, path: False)  # wherever pytest's folders are
    with build_checkpointer("sync", ["checkpoint/stager=shared_memory"], outside=outside) as checkpointer:
        for number in range(3):
            checkpointer.save(STATE, tmp_path / str(number))
    assert tried == (["buffered", "direct"] * 2 if available else ["buffered", "direct"])
    assert caplog.text.count(f"checkpoint.writer.io=auto: {found}") == 1
    assert len(opened) == (2 + 3 * 2 if available else 1)
    assert all(not list((tmp_path / str(number)).glob(".io-trial*")) for number in range(3))


def test_ranks_try_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_job, "TRIED_BYTES", 1 << 20)
    create, both = FileStorage.create, threading.Barrier(2)

    def together(fs: FileStorage, path: str, size: int = 0) -> int:
        fd = create(fs, path, size)
        both.wait(30)  # both files are there now
        return fd

    monkeypatch.setattr(FileStorage, "create", together)
    sample = memoryview(mmap.mmap(-1, 1 << 20))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(write_job.try_modes, FileStorage(), str(tmp_path), sample) for _ in range(2)]
    assert all(each.result()[0] > 0 for each in found)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("direct", "waiting", "beside"),
    [
        (0.9, "direct", "direct"),
        (1.4, "buffered", "direct"),  # training gets the core that copying would take
        (1.6, "buffered", "buffered"),
        (None, "buffered", "buffered"),
    ],
)
def test_direct_may_take_longer_beside_training(direct: float | None, waiting: str, beside: str) -> None:
    assert write_job.better_mode(1.0, direct, beside_training=False) == waiting
    assert write_job.better_mode(1.0, direct, beside_training=True) == beside


def test_small_images_are_not_worth_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStorage, "open_direct", without_direct_io)
    save(tmp_path / "one", "sync", "io=auto")
    assert (tmp_path / "one" / "manifest.json").exists()


def test_the_rate_holds_for_all_writers_together() -> None:
    outside, slept = Outside(), list[float]()
    outside.now, outside.sleep = lambda: sum(slept), slept.append
    throttle = Throttle(1000.0, outside)
    for _ in range(4):
        throttle.wait(500)
    assert slept == [0.5] * 4


@pytest.mark.slow
def test_a_rate_limit_is_kept_by_the_writer_process(tmp_path: Path) -> None:
    started = time.monotonic()
    save(tmp_path / "one", "async_persistent", "max_bytes_per_second=4000000", "block_bytes=65536")
    # 2.5 MB.
    assert time.monotonic() - started > 0.5
    with pytest.raises(CheckpointConfigError, match="max_bytes_per_second"):
        build_checkpointer("sync", ["checkpoint.writer.max_bytes_per_second=0"])
