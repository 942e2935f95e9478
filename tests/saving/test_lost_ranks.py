"""A rank that dies, stops or hangs in the middle of a save: the others get an error in bounded time, not a hang."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import finish_ranks, run_ranks, start_ranks

from ckpt_component import CheckpointLoadError, build_checkpointer, build_manager
from ckpt_component.core.commit.names import ALIVE_PREFIX
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "lost.py"


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_with_a_killed_rank(function: str, killed: int, folder: Path) -> None:
    results = finish_ranks(start_ranks(SCRIPT, function, 2, folder), 60)
    told = "\n".join(result.output for result in results)
    assert results[killed].code == -signal.SIGKILL, told
    assert results[1 - killed].code == 0, told


def test_a_rank_killed_in_the_vote(tmp_path: Path) -> None:
    run_with_a_killed_rank("killed_in_vote", 1, tmp_path)


def test_a_leader_killed_after_the_commit(tmp_path: Path) -> None:
    run_with_a_killed_rank("leader_killed_after_commit", 0, tmp_path)
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(tmp_path / "run" / "one")["weight"].eq(3).all()
    with build_manager("sync", dir=tmp_path / "run") as manager:
        manager.restore({})
    assert not (tmp_path / "run" / "two").exists()


def test_a_leader_killed_in_the_decision(tmp_path: Path) -> None:
    run_with_a_killed_rank("leader_killed_in_the_decision", 0, tmp_path)
    wait_for(lambda: (tmp_path / "run" / "one").exists())
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(tmp_path / "run" / "one")["weight"].eq(3).all()


@contextlib.contextmanager
def trainers_killed_in_mid_write(folder: Path, before: int, locks: bool = True) -> Iterator[list[psutil.Process]]:
    """The stopped writer processes of two ranks whose trainers are dead."""
    env: dict[str, Any] = {"SAVED_BEFORE": str(before)}
    if not locks:
        env |= {FAILPOINT: "flock:action=raise:ENOLCK", FAILPOINT_LOG: str(folder / "ops")}
    ranks = start_ranks(SCRIPT, "all_killed_in_mid_write", 2, folder, **env)
    writers = []
    try:
        codes = [rank.code for rank in finish_ranks(ranks, 60)]
        writers = [psutil.Process(int((folder / f"writer-{rank}").read_text())) for rank in range(2)]
        assert codes == [-signal.SIGKILL] * 2
        yield writers
        _, alive = psutil.wait_procs(writers, timeout=20)
        assert not alive
    finally:
        for writer in writers:
            with contextlib.suppress(psutil.NoSuchProcess):
                writer.kill()


def checkpoints_in(root: Path) -> list[str]:
    """Without locks the file stays by which a killed trainer showed that it lived, until the next start."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(ALIVE_PREFIX))


@pytest.mark.turns(3)
@pytest.mark.parametrize(("before", "locks"), [(0, True), (1, True), (1, False)])
def test_writers_of_dead_trainers_commit_together(before: int, locks: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    with trainers_killed_in_mid_write(tmp_path, before, locks) as writers:
        writers[0].resume()
        wait_for(lambda: bool(list(root.glob(".ckpt-tmp.two.*/integrity-0.json"))))
        assert writers[0].is_running() and not (root / "two").exists()
        writers[1].resume()
    assert checkpoints_in(root) == ["one", "two"][1 - before :]
    with build_checkpointer("sync") as checkpointer:
        loaded = checkpointer.load(root / "two")
    assert loaded["weight"].eq(3).all() and loaded["other"].eq(1).all()
    manifest = json.loads((root / "two" / "manifest.json").read_text())["manifest"]
    assert manifest["committed_by"] == "writer" and manifest["world_size"] == 2


@pytest.mark.turns(3)
@pytest.mark.parametrize("locks", [True, False])
def test_a_writer_that_is_gone_too_leaves_nothing(locks: bool, tmp_path: Path) -> None:
    with trainers_killed_in_mid_write(tmp_path, 1, locks) as writers:
        writers[1].kill()
        writers[0].resume()
    assert checkpoints_in(tmp_path / "run") == ["one"]


@pytest.mark.turns(3)
@pytest.mark.parametrize("function", ["stopped_rank", "stopped_worker"])
def test_whoever_stops_past_the_deadline_commits_nothing(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)


def test_five_overlapping_saves_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "overlapping", 2, tmp_path)


def test_a_rank_that_sees_the_folder_late(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "late_view", 2, tmp_path)


def test_files_of_a_ranks_own_load_on_as_many_ranks_alone(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "own_files", 2, tmp_path)
    with build_checkpointer("sync") as checkpointer, pytest.raises(CheckpointLoadError, match="saved by 2 ranks"):
        checkpointer.load(tmp_path / "own")
