"""Ranks on several hosts read together and pass on what they read; ranks are threads here."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from thread_gloo import Reading, ThreadGloo

from ckpt_component import build_checkpointer
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.open_files import OpenFiles
from ckpt_component.errors import CheckpointUnreadableError

#: What each rank loads: they share one tensor, and each wants one that the other one does not.
WANTED = (("a", "b"), ("b", "c"))
#: Of each tensor: enough for many more batches than may be on their way, or come ahead of what is waited for.
COUNT = 500_000
NBYTES = 4 * COUNT


class Files(OpenFiles):
    """Files of which the bytes that are read are counted, and the first reads to pass on fail."""

    def __init__(self, folder: str, storage: Reads) -> None:
        super().__init__(folder)
        self._storage = storage

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        self._storage.nbytes += buffer.nbytes
        self._storage.passed_on += 1
        if self._storage.passed_on <= self._storage.failing:
            raise CheckpointUnreadableError(f"{name} is not here today.")
        return super().fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        self._storage.nbytes += length
        return super().fill_block(name, offset, length)


class Reads(FileStorage):
    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing, self.passed_on, self.nbytes = failing, 0, 0

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        return Files(folder, self)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(COUNT)) * value + number for number, name in enumerate("abc")}


def load_together(
    folder: Path, storages: Sequence[Reads], *overrides: str, flips: bool = False, silent: int = -1
) -> float:
    """Save, load on both ranks what each of them wants, and compare; an error of a rank is raised.

    Returns:
        How often each byte was read, on average.
    """
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state_of(2), folder / "one")
    building, loaded = threading.Lock(), dict[int, dict[str, torch.Tensor]]()
    gloo = ThreadGloo(2)
    gloo.flips, gloo.silent = flips, silent
    with rank_threads(2, [Reading("a", gloo), Reading("b", gloo)]) as on_all:

        def load(ranks: StoreCoordinator) -> None:
            gloo.of(ranks.rank)
            with building:
                ours = build_checkpointer("sync", overrides, ranks=ranks, storage_of=lambda _: storages[ranks.rank])
            state = {name: torch.zeros(COUNT) for name in WANTED[ranks.rank]}
            ours.load(folder / "one", state)
            loaded[ranks.rank] = state

        assert on_all(load) == [None, None]
    expected = state_of(2)
    for rank, names in enumerate(WANTED):
        assert all(torch.equal(loaded[rank][name], expected[name]) for name in names), rank
    return sum(each.nbytes for each in storages) / sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_each_byte_is_read_once_and_both_ranks_read(verify: str, tmp_path: Path) -> None:
    storages = [Reads(), Reads()]
    assert 0.98 < load_together(tmp_path, storages, f"checkpoint.verify={verify}") < 1.02
    assert all(0.4 < each.nbytes / (3 * NBYTES) < 0.6 for each in storages)


@pytest.mark.parametrize("verify", ["on_read", "off"])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_rank_could_not_read_reaches_no_tensor_of_another(failing: int, verify: str, tmp_path: Path) -> None:
    storages = [Reads(rank == failing) for rank in range(2)]
    assert 1.02 < load_together(tmp_path, storages, f"checkpoint.verify={verify}") < 1.5


def test_a_rank_that_can_read_nothing_fails_and_costs_the_other_one_what_it_wants(tmp_path: Path) -> None:
    storages = [Reads(1000), Reads()]
    with pytest.raises(AssertionError, match="CheckpointUnreadableError"):
        load_together(tmp_path, storages)
    assert storages[1].nbytes < 1.02 * 2 * NBYTES and storages[0].passed_on < 10


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_what_was_damaged_between_ranks_reaches_no_tensor(verify: str, tmp_path: Path) -> None:
    assert load_together(tmp_path, [Reads(), Reads()], f"checkpoint.verify={verify}", flips=True) > 1.02


@pytest.mark.parametrize("silent", [0, 1])
def test_what_does_not_arrive_is_read_by_who_wants_it(
    silent: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storages = [Reads(), Reads()]
    times = load_together(tmp_path, storages, "checkpoint.timeouts.stall=0.5", silent=silent)
    assert 1.02 < times < 1.5 and storages[silent].nbytes < storages[1 - silent].nbytes
    # All of it is given up at once, and not batch by batch.
    [said] = [text for text in caplog.messages if "passes nothing on" in text]
    assert re.match(rf"rank {silent} passes nothing on: it takes too long .*; [1-9][0-9.]* (kB|MB) are read", said), (
        said
    )
