"""Ranks on several hosts read together and pass on what they read; ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from thread_gloo import reading_together

from ckpt_component import build_checkpointer
from ckpt_component.core.coordination import StoreCoordinator
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.open_files import OpenFiles
from ckpt_component.errors import CheckpointUnreadableError

#: What each rank loads: they share one tensor, and each wants one that the other one does not.
WANTED = (("a", "b"), ("b", "c"))


class Files(OpenFiles):
    """Files of which a read into a message is counted, and the first ones fail."""

    def __init__(self, folder: str, storage: Reads) -> None:
        super().__init__(folder)
        self._storage = storage

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        self._storage.passed_on += 1
        if self._storage.passed_on <= self._storage.failing:
            raise CheckpointUnreadableError(f"{name} is not here today.")
        return super().fill(name, buffer, offset)


class Reads(FileStorage):
    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing, self.passed_on = failing, 0

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        return Files(folder, self)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.arange(1000.0) * value + number for number, name in enumerate("abc")}


def load_together(folder: Path, storages: Sequence[Reads], verify: str, *, flips: bool = False) -> None:
    """Save, load on both ranks what each of them wants, and compare; an error of a rank is raised."""
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state_of(2), folder / "one")
    building, loaded = threading.Lock(), dict[int, dict[str, torch.Tensor]]()
    with reading_together(2) as gloo, rank_threads(2) as on_all:
        gloo.flips = flips

        def load(ranks: StoreCoordinator) -> None:
            gloo.of(ranks.rank)
            with building:
                overrides = [f"checkpoint.verify={verify}"]
                ours = build_checkpointer("sync", overrides, ranks=ranks, storage_of=lambda _: storages[ranks.rank])
            state = {name: torch.zeros(1000) for name in WANTED[ranks.rank]}
            ours.load(folder / "one", state)
            loaded[ranks.rank] = state

        assert on_all(load) == [None, None]
    expected = state_of(2)
    for rank, names in enumerate(WANTED):
        assert all(torch.equal(loaded[rank][name], expected[name]) for name in names), rank


@pytest.mark.parametrize("verify", ["on_read", "off"])
@pytest.mark.parametrize("failing", [None, 0, 1], ids=["all read", "rank 0 cannot", "rank 1 cannot"])
def test_what_a_rank_could_not_read_reaches_no_tensor_of_another(
    failing: int | None, verify: str, tmp_path: Path
) -> None:
    storages = [Reads(failing=rank == failing) for rank in range(2)]
    load_together(tmp_path, storages, verify)
    assert sum(each.passed_on for each in storages) > 0, "they read together"


@pytest.mark.parametrize("verify", ["on_read", "off"])
def test_what_was_damaged_between_ranks_reaches_no_tensor(verify: str, tmp_path: Path) -> None:
    load_together(tmp_path, [Reads(), Reads()], verify, flips=True)
