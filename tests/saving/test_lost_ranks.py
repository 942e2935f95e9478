"""A rank that dies, stops or hangs in the middle of a save: the others get an error in bounded time, not a hang."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import finish_ranks, run_ranks, start_ranks

from ckpt_component import CheckpointLoadError, build_checkpointer, build_manager

SCRIPT = Path(__file__).parent / "scripts" / "lost.py"


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


@pytest.mark.parametrize("function", ["stopped_rank", "stopped_worker", "overlapping"])
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)


def test_files_of_a_ranks_own_load_on_as_many_ranks_alone(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "own_files", 2, tmp_path)
    with build_checkpointer("sync") as checkpointer, pytest.raises(CheckpointLoadError, match="saved by 2 ranks"):
        checkpointer.load(tmp_path / "own")
