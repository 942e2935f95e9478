"""What the ranks of test_collective run: every function takes (rank, world size, folder) and asserts on each rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_component import RanksError, build_checkpointer
from ckpt_component.core.storage.files import FileStorage


class Gathers:
    """An object that gathers from all ranks when it takes its state."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.full((2,), dist.get_rank() + 1.0))
        self.total = sum(part.sum().item() for part in parts)


class Reduces(Gathers):
    """One that reduces."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        total = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(total)
        self.total = total.item()


def other_orders(rank: int, world_size: int, folder: Path) -> None:
    """In a wrong order the collectives of the two objects would meet each other."""
    names = ("gathers", "reduces") if rank == 0 else ("reduces", "gathers")
    state = {name: Gathers() if name == "gathers" else Reduces() for name in names}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, folder / "one")
        checkpointer.load(folder / "one", state, strict=True)
    assert state["gathers"].total == 6 and state["reduces"].total == 3


def killed_while_it_reads(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 hears of it by the heartbeat, and its object is as it was."""

    class Killed(FileStorage):
        def open_files(self, folder: str, *, shared: bool = True) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().open_files(folder, shared=shared)

    state = {"one": Gathers()}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, folder / "one")
    checkpointer = build_checkpointer("sync", ["checkpoint.timeouts.heartbeat=1"], storage_of=lambda _: Killed())
    with pytest.raises(RanksError) as caught:
        checkpointer.load(folder / "one", state)
    assert "sent no heartbeat for 1 s" in caught.value.failures[1]
    assert state["one"].total == 0
    os._exit(0)  # there is nobody left to part from
