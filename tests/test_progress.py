"""Progress bars: on a terminal only, gone at the end, and never in the way of what they follow."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.core import progress as bars
from ckpt_component.core.progress import progress_bar
from ckpt_component.loading import Reader

WEIGHT = torch.arange(300_000, dtype=torch.float32)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr, on which even the shortest wait shows its bar. Not a fixture: pytest then puts its own stderr there."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(bars, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(sys.stderr, Terminal)
    return sys.stderr


class Recorder:
    """Takes what is reported: (work, its size, the bytes done)."""

    def __init__(self) -> None:
        self.work: list[tuple[str, int, int]] = []

    @contextmanager
    def __call__(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        done = list[int]()
        yield done.append
        self.work.append((what, total, sum(done)))


@pytest.mark.parametrize("writer", ["dcp", "safetensors", "torch_save"])
def test_a_load_reports_all_its_bytes(tmp_path: Path, writer: str) -> None:
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as checkpointer:
        checkpointer.save({"weight": WEIGHT, "small": torch.ones(3)}, tmp_path / "saved")
    for target in (None, {"weight": torch.zeros(300_000), "small": torch.zeros(3)}):
        recorder = Recorder()
        loaded, _ = Reader(progress=recorder).read(str(tmp_path / "saved"), target)
        assert torch.equal(loaded["weight"], WEIGHT)
        sizes = [total for what, total, done in recorder.work if what.startswith("reading ") and done == total]
        assert len(sizes) == len(recorder.work) and max(sizes) >= 1_200_000


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["async_persistent", "sync"])
def test_a_run_on_a_terminal_shows_saves_that_it_waits_for_and_its_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    stderr, before = terminal(monkeypatch), {*threading.enumerate()}
    # Slow enough that the end of the run waits for the save.
    slow = ["checkpoint.save.every_steps=1", "checkpoint.writer.max_bytes_per_second=2000000"]
    slow += ["checkpoint.writer.block_bytes=65536", "checkpoint.writer.workers=1"]
    with build_manager(preset, slow, dir=tmp_path) as manager:
        assert manager.restore({}) is None
        manager.maybe_save(1, {"weight": WEIGHT})
    assert "saving iter_0000001: " in stderr.getvalue() and "/1.20M" in stderr.getvalue()
    state = {"weight": torch.zeros(300_000)}
    with build_manager(preset, dir=tmp_path) as manager:
        assert manager.restore(state) == 1
    assert "reading iter_0000001: " in stderr.getvalue()
    assert not stderr.getvalue().rsplit("\r", 2)[1].strip()  # the bar is gone
    assert {*threading.enumerate()} <= before


def test_log_lines_do_not_share_a_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    logger = logging.getLogger("ckpt_component.saving")
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    try:
        with progress_bar("verify", 100) as advance:
            time.sleep(0.15)  # tqdm shows ten values a second
            advance(50)
            logger.error("a line")
    finally:
        logging.getLogger().removeHandler(handler)
    before = stderr.getvalue().partition("a line")[0]
    assert "50%" in before and before.endswith("\r") and not before.rsplit("\r", 2)[1].strip()


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    logger = logging.getLogger("ckpt_component.progress")

    def shown() -> str:
        stderr.seek(0)
        stderr.truncate()
        with progress_bar("verify", 100) as advance:
            time.sleep(0.15)  # tqdm shows ten values a second
            advance(50)
        return stderr.getvalue()

    assert "50%" in shown()
    logger.setLevel(logging.ERROR)  # as `ckpt -q` sets it
    try:
        assert not shown()
    finally:
        logger.setLevel(logging.NOTSET)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tqdm", None)  # not installed
        assert not shown()
    monkeypatch.setattr(stderr, "isatty", lambda: False)
    assert not shown()
    stderr.close()
    with progress_bar("verify", 100) as advance:
        advance(50)


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_rank_without_the_terminal_waits_for_its_saves_as_well(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with build_checkpointer(preset) as checkpointer:
        checkpointer.save({"weight": WEIGHT}, tmp_path / "saved")
        checkpointer.wait()
        assert checkpointer.last_report is not None and checkpointer.last_report.outcome == "committed"
