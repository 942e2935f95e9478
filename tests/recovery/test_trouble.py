"""Trouble in the middle of a run: its disk fails, or a server stands still or dies. The run goes on, and so does the next."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from snapshots import MEMORY, client_of, finish_lives, gone, in_memory, kill, live, paused, start_lives, stopped
from waiting import eventually

from ckpt_component import build_checkpointer, build_manager

RETRY = ["checkpoint.on_error=retry", "checkpoint.retry.backoff_seconds=0.01"]
QUIET = [*MEMORY, "checkpoint.save.every_steps=100", "checkpoint.save.at_end=false"]


def weight(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


def loaded(path: str) -> float:
    """From the disk."""
    state = weight(0)
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(path, state)
    assert state["weight"].unique().numel() == 1
    return float(state["weight"][0])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
@pytest.mark.usefixtures("left_on_purpose")
@pytest.mark.parametrize("fault", ["raise:EIO", "kill"])
def test_a_save_that_is_retried_leaves_memory_and_the_disk_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The writer process dies with what it has kept; only its disk fails, and it keeps it."""
    with monkeypatch.context() as failing:
        failing.setenv("CKPT_FAILPOINT", f"sync:process=writer:path=__0_0:nth=1:action={fault}")
        failing.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "operations"))
        (killed,) = live(tmp_path, steps=4, durable=[3], waits=True, overrides=RETRY, end="kill")
    assert "attempt 1 of 3 failed" in killed.output and killed.told["steps"] == [3]
    (after,) = live(tmp_path, end="kill")
    assert after.restored == (4, "memory") and after.told["began"] == killed.told["digests"]["4"]
    (back,) = live(tmp_path, overrides=["checkpoint.resume=3", "checkpoint.rewind=true"])
    assert back.restored == (3, "storage") and back.told["began"] == killed.told["digests"]["3"]


def test_saves_go_on_with_a_server_that_stood_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build_manager("async_persistent", QUIET, dir=tmp_path / "run") as manager:
        manager.maybe_save(1, weight(1))
        manager.wait()
        with stopped(client_of(0)):
            manager.maybe_save(2, weight(2))
            manager.save(3, weight(3))
        manager.wait()
        assert sorted((report.step, report.memory) for report in manager.reports) == [(1, True), (2, True), (3, False)]
        assert {report.outcome for report in manager.reports} == {"committed"}
        eventually(lambda: in_memory(manager.path_of(3)))
        assert loaded(manager.path_of(3)) == 3 and warnings_in(caplog) == []


@pytest.mark.slow
def test_a_server_that_stands_still_is_replaced_when_a_save_is_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that keeps snapshots also writes: a save that it does not answer is written by a new one."""
    options = [*QUIET, *RETRY, "checkpoint.timeouts.write=3s"]
    with build_manager("async_persistent", options, dir=tmp_path / "run") as manager:
        manager.maybe_save(1, weight(1))
        manager.wait()
        began, client = time.monotonic(), client_of(0)
        client.suspend()
        manager.save(2, weight(2))
        manager.wait()
        assert time.monotonic() - began < 20
        gone(client)
        assert len([text for text in warnings_in(caplog) if "attempt 1 of 3 failed" in text]) == 1
        assert len([text for text in warnings_in(caplog) if "did not become whole in memory" in text]) == 1
        caplog.clear()
        manager.maybe_save(3, weight(3))
        manager.save(4, weight(4))
        manager.wait()
        eventually(lambda: in_memory(manager.path_of(4)))
        assert [loaded(manager.path_of(step)) for step in manager.steps()] == [2, 4] and warnings_in(caplog) == []


@pytest.mark.slow
@pytest.mark.usefixtures("left_on_purpose")
def test_the_next_run_finds_what_was_kept_after_a_server_died(tmp_path: Path) -> None:
    with paused(tmp_path, world_size=2, steps=6, pause=3, end="kill") as killed:
        kill(client_of(1))
    assert any("WARNING" in life.output for life in killed)
    after = live(tmp_path, world_size=2)
    assert [life.restored for life in after] == [(6, "memory")] * 2
    assert [life.told["began"] for life in after] == [life.told["digests"]["6"] for life in killed]


def test_ranks_that_do_not_see_each_others_snapshots_say_once_what_they_need(tmp_path: Path) -> None:
    """As in two containers of one host, of which each has a /tmp."""
    lives = live(
        tmp_path,
        world_size=2,
        steps=5,
        durable=[3],
        waits=True,
        ranks={"1": {"runtime": str(tmp_path / "apart")}},
    )
    for life in lives:
        warnings = [line for line in life.output.splitlines() if "memory" in line and line.startswith("WARNING")]
        assert len(warnings) == 2, life.output
        assert "iter_0000001 did not become whole in memory, and training continues" in warnings[0]
        assert warnings[0].endswith(
            "which another rank made, cannot be seen from here; all ranks need one folder CKPT_RUNTIME_DIR on each host, "
            "in all its containers. (logged once, then counted)"
        )
        assert warnings[1] == "WARNING in all, 5 snapshots did not become whole in memory"


@pytest.mark.slow
@pytest.mark.usefixtures("left_on_purpose")
def test_the_next_run_begins_at_the_newest_step_that_all_had_when_one_rank_died_before_the_others(
    tmp_path: Path,
) -> None:
    killed = finish_lives(
        start_lives(
            tmp_path,
            world_size=2,
            steps=5,
            waits=True,
            together=False,
            end="kill",
            state={"averages": False},
            overrides=["checkpoint.timeouts.heartbeat=1s"],
            ranks={"1": {"steps": 3}},
        )
    )
    assert killed[0].output.count("did not become whole in memory, and training continues") == 1, killed[0].output
    after = live(tmp_path, world_size=2)
    assert [life.restored for life in after] == [(3, "memory")] * 2
    assert [life.told["began"] for life in after] == [life.told["digests"]["3"] for life in killed]
