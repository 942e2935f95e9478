"""The newest checkpoint stays in the page cache, where memory is plentiful; an older one does not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointManager, build_manager
from ckpt_component.core import available_memory
from ckpt_component.core.storage.open_files import share_in_memory
from ckpt_component.core.storage.safe_open import is_on_disk
from ckpt_component.core.writing import worker

STATE = {"w": torch.arange(6 << 20, dtype=torch.float32)}


@pytest.fixture(autouse=True)
def on_disk(tmp_path: Path) -> None:
    if not is_on_disk(str(tmp_path)):
        pytest.skip("the folder is not on a local disk")


def cached(folder: str) -> float:
    """The share of a checkpoint's data that is in the page cache."""
    files = [path for path in Path(folder).iterdir() if path.suffix == ".distcp" and path.stat().st_size > 1 << 20]
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    try:
        share = share_in_memory([(fd, 0, os.fstat(fd).st_size) for fd in descriptors])
    finally:
        for fd in descriptors:
            os.close(fd)
    assert share is not None
    return share


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def manager_in(folder: Path, *overrides: str) -> CheckpointManager:
    return build_manager("async_persistent", ["checkpoint.save.at_end=false", *overrides], dir=folder)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_the_newest_is_cached_and_the_one_before_no_more(tmp_path: Path, io: str) -> None:
    with manager_in(tmp_path, f"checkpoint.writer.io={io}") as manager:
        for step in (1, 2):
            manager.save(step, STATE)
            manager.wait()
            until(lambda step=step: cached(manager.path_of(step)) == 1)  # type: ignore[misc]
        until(lambda: cached(manager.path_of(1)) == 0)


def test_a_file_that_the_newest_shares_with_the_one_before_stays_cached(tmp_path: Path) -> None:
    state = {**STATE, "adapter": torch.zeros(1 << 20)}
    with manager_in(tmp_path, "checkpoint.writer.io=direct", "checkpoint.reuse.frozen=[w]") as manager:
        manager.save(1, state)
        manager.wait()
        until(lambda: cached(manager.path_of(1)) == 1)
        state["adapter"] += 1
        manager.save(2, state)
        manager.wait()
        least = 1.0

        def all_is_cached() -> bool:
            nonlocal least
            share = cached(manager.path_of(2))
            least = min(least, share)
            return share == 1

        until(all_is_cached)
        assert least > 0.8  # what was written is a seventh


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["async_persistent", "async_temporal", "sync"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_off_and_with_other_callers_nothing_is_left(tmp_path: Path, io: str, preset: str) -> None:
    off = ["checkpoint.caller.page_cache=off"] if preset == "async_persistent" else []
    with build_manager(preset, [f"checkpoint.writer.io={io}", *off], dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, STATE)  # the second is written by a process that would have read the first before
            manager.wait()
        assert cached(manager.path_of(1)) == cached(manager.path_of(2)) == 0


def test_what_is_plentiful_heeds_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 20000000 kB\nMemAvailable: 8000 kB\n")
    group.mkdir()
    genuine = open

    def opened(path: str, **how: Any) -> Any:
        """The files of a machine of our own; the group of this process has no limit itself."""
        place = Path(path)
        if path == "/proc/meminfo":
            place = meminfo
        elif path.startswith("/sys/fs/cgroup/"):
            place = group / path.removeprefix("/sys/fs/cgroup/")
        return genuine(place, **how)

    monkeypatch.setattr(available_memory, "open", opened, raising=False)
    assert available_memory.available_bytes() == 8000 << 10
    assert available_memory.is_plentiful(2000 << 10) and not available_memory.is_plentiful(2001 << 10)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 1\nactive_file 500000\ninactive_file 1000000\n")
    # The group of this process may be deeper; those above it count as well.
    assert available_memory.available_bytes() == 2_500_000
    (group / "memory.max").write_text("max\n")
    assert available_memory.available_bytes() == 8000 << 10
    meminfo.unlink()
    assert not available_memory.is_plentiful(1)


def test_a_checkpoint_that_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one whose other ranks on this host would not fit too."""
    from types import SimpleNamespace

    request = SimpleNamespace(fs=SimpleNamespace(has_direct_io=True), source=SimpleNamespace(nbytes=1000), world_size=8)
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 32_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert worker.CachedFiles.fit(request)  # type: ignore[arg-type]
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 31_999)
    assert not worker.CachedFiles.fit(request)  # type: ignore[arg-type]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert worker.CachedFiles.fit(request)  # type: ignore[arg-type]
