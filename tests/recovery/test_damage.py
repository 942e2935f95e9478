"""Damaged, dead and silent servers: all ranks fall back together, and say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from snapshots import MEMORY, client_of, clients, finish_lives, flip_images, kill, live, start_lives, stopped
from waiting import eventually

from ckpt_component import build_checkpointer, build_manager

#: Bytes of a weight that never changes, which only images have.
PATTERN = torch.arange(1000, 1064, dtype=torch.float32).numpy().tobytes()
FROZEN = {"frozen": 4096}


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.match("ERROR ", line)]


@pytest.mark.usefixtures("left_on_purpose")
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_ranks_fall_back_together_from_a_damaged_image(tmp_path: Path, world_size: int) -> None:
    killed = live(tmp_path, world_size=world_size, steps=3, durable=[1], end="kill", state=FROZEN)
    damaged = 0
    for process in clients().values():
        try:
            flip_images(process, PATTERN)
            damaged += 1
        except AssertionError:
            continue  # the other rank has that weight
    assert damaged
    after = live(tmp_path, world_size=world_size, state=FROZEN, end="kill")
    assert [life.restored for life in after] == [(1, "storage")] * world_size
    assert [life.told["began"] for life in after] == [life.told["digests"]["1"] for life in killed]
    (told,) = [line for life in after for line in errors(life.output)]  # one line for all ranks
    assert "The item at bytes" in told
    third = live(tmp_path, world_size=world_size, state=FROZEN)
    assert [life.restored for life in third] == [(1, "storage")] * world_size
    assert not any(errors(life.output) for life in third), "it is gone from memory"


@pytest.mark.slow
@pytest.mark.usefixtures("left_on_purpose")
def test_no_tensor_is_touched_when_memory_and_the_disk_are_damaged(tmp_path: Path) -> None:
    live(tmp_path, steps=3, durable=[1], end="kill", state=FROZEN)
    flip_images(client_of(0), PATTERN)
    (tmp_path / "run" / "iter_0000001" / "__0_0.distcp").unlink()
    (after,) = finish_lives(start_lives(tmp_path, state=FROZEN))
    assert after.code == 1 and after.told["untouched"], after.output


@pytest.mark.soak
@pytest.mark.usefixtures("left_on_purpose")
def test_a_server_that_is_silent_is_passed_over_within_its_deadline(tmp_path: Path) -> None:
    live(tmp_path, steps=3, durable=[1], end="kill")
    with stopped(client_of(0)):
        (after,) = live(tmp_path, end="kill")
    assert after.restored == (1, "storage") and "cannot be used" in after.output


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


@pytest.mark.slow
def test_training_goes_on_when_its_server_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = [*MEMORY, "checkpoint.save.every_steps=100", "checkpoint.on_error=warn", "checkpoint.save.at_end=false"]
    with build_manager("async_persistent", overrides, dir=tmp_path / "run") as manager:
        manager.restore(state_of(0))
        manager.maybe_save(1, state_of(1))
        manager.wait()
        kill(client_of(0))
        for step in (2, 3, 4):
            manager.maybe_save(step, state_of(step))
            manager.wait()
        assert [(report.step, report.outcome) for report in manager.reports][-1] == (4, "committed")
        assert any(record.levelname == "WARNING" for record in caplog.records)
        assert client_of(0).is_running(), "a new one"


def test_loads_take_a_checkpoint_from_memory_while_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [*MEMORY, "checkpoint.save.every_steps=100", "checkpoint.save.at_end=false"]
    with build_manager("async_persistent", overrides, dir=tmp_path / "run") as manager:
        manager.save(1, {"weight": torch.arange(1000, 2000, dtype=torch.float32)})
        manager.wait()
        path = manager.path_of(1)
        with build_checkpointer("async_persistent", ["checkpoint/recovery=host"]) as checkpointer:

            def source() -> str:
                state = {"weight": torch.zeros(1000)}
                checkpointer.load(path, state)
                assert torch.equal(state["weight"], torch.arange(1000, 2000, dtype=torch.float32))
                assert checkpointer.last_load is not None
                return checkpointer.last_load.source

            eventually(lambda: source() == "memory")
            flip_images(client_of(0), PATTERN)
            caplog.clear()
            assert source() == "storage"
            assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
            manager.maybe_save(2, state_of(2))
            manager.wait()
            caplog.clear()
            assert source() == "storage" and not caplog.records
