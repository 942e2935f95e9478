"""Which step a run resumes from, when memory and the disk have different ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from snapshots import clients, in_memory, kill, live, paused
from waiting import eventually

pytestmark = pytest.mark.usefixtures("left_on_purpose")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resume", "restored"),
    [("must", (3, "memory")), ("never", (None, None)), pytest.param("3", (3, "memory"), marks=pytest.mark.slow)],
)
def test_resume_means_what_it_means_for_a_step_that_is_in_memory_alone(
    tmp_path: Path, resume: str, restored: tuple[int | None, str | None]
) -> None:
    live(tmp_path, steps=3, end="kill")
    (after,) = live(tmp_path, overrides=[f"checkpoint.resume={resume}"])
    assert after.restored == restored and after.told["untouched"] == (resume == "never")


@pytest.mark.slow
def test_resume_names_the_older_step_on_the_disk(tmp_path: Path) -> None:
    (killed,) = live(tmp_path, steps=3, durable=[1], end="kill")
    (after,) = live(tmp_path, overrides=["checkpoint.resume=1", "checkpoint.rewind=true"], end="kill")
    assert after.restored == (1, "storage") and after.told["began"] == killed.told["digests"]["1"]
    assert "dropped step 3 from memory" in after.output
    (last,) = live(tmp_path)
    assert last.restored == (1, "storage")


@pytest.mark.slow
def test_a_later_run_without_recovery_makes_the_snapshot_stale(tmp_path: Path) -> None:
    live(tmp_path, steps=3, durable=[1], end="kill")
    (second,) = live(tmp_path, recovery=False, steps=2, durable=[2])
    assert second.restored == (1, "storage")
    (third,) = live(tmp_path)
    assert third.restored == (2, "storage") and third.told["began"] == second.told["digests"]["2"]


def test_a_run_whose_folder_was_deleted_starts_from_scratch(tmp_path: Path) -> None:
    live(tmp_path, steps=3, durable=[1], end="kill")
    shutil.rmtree(tmp_path / "run")
    (after,) = live(tmp_path)
    assert after.restored == (None, None) and after.told["untouched"]


@pytest.mark.slow
def test_without_steps_of_its_own_memory_has_what_was_saved(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"overrides": ["checkpoint.recovery.every_steps=null"]}
    with paused(tmp_path, **plan, steps=3, durable=[2], pause=3, end="kill") as lives:
        eventually(lambda: in_memory(tmp_path / "run" / "iter_0000002"))  # no save waits for that
    (killed,), (after,) = lives, live(tmp_path, **plan)
    assert after.restored == (2, "memory") and after.told["began"] == killed.told["digests"]["2"]


@pytest.mark.slow
def test_a_step_that_is_saved_by_hand_is_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    (killed,) = live(tmp_path, steps=3, durable=[3], by_hand=[3], end="kill")
    assert killed.told["steps"] == [3] and "WARNING" not in killed.output
    (second,) = live(tmp_path, end="kill")
    assert second.restored == (3, "memory") and second.told["began"] == killed.told["digests"]["3"]
    for process in clients().values():
        kill(process)
    (third,) = live(tmp_path)
    assert third.restored == (3, "storage") and third.told["began"] == killed.told["digests"]["3"]
