"""Ranks, each of them on a host of its own, load together: what each of them reads from storage is counted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_component import CheckpointError, build_checkpointer, build_manager
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.open_files import OpenFiles
from ckpt_component.errors import CheckpointUnreadableError

#: One item is more than half of the bytes; the small ones are read many at a time.
SHAPES = {"large": (1024, 512), "wide": (64, 2048), **{f"layer.{n}": (16, 40) for n in range(20)}}
DATA = sum(rows * columns * 4 for rows, columns in SHAPES.values())
#: What a rank does before it reads a range; raises, or ends, or waits.
Before = Callable[[str, int], None]


class CountedFiles(OpenFiles):
    """Files that note how many bytes of them were read."""

    def __init__(self, folder: str, storage: CountedStorage) -> None:
        super().__init__(folder)
        self._storage = storage

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        self._storage.note(name, buffer.nbytes)
        return super().fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        self._storage.note(name, length)
        return super().fill_block(name, offset, length)


class CountedStorage(FileStorage):
    """Files of checkpoints whose reads are counted, and may fail."""

    def __init__(self, before: Before = lambda name, nbytes: None) -> None:
        super().__init__()
        self.counted = 0
        self._before = before

    def note(self, name: str, nbytes: int) -> None:
        self._before(name, nbytes)
        self.counted += nbytes

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        return CountedFiles(folder, self)


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def placed(layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a framework lays them out over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "replicated":
        return {key: tensor.clone() for key, tensor in tensors.items()}
    found = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        tensor_parallel = [Shard(1), Shard(0), Replicate()][number % 3]
        found[key] = distribute_tensor(tensor, mesh, [Shard(0) if layout == "fsdp" else tensor_parallel])
    return found


def is_whole(state: dict[str, torch.Tensor], seed: int = 0) -> bool:
    expected = placed("replicated", values(seed))
    return all(
        torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[key])
        for key, value in state.items()
    )


@contextmanager
def hosts(rank: int, ranks_of_host: int = 1) -> Iterator[None]:
    os.environ["CKPT_HOST"] = f"host{rank // ranks_of_host}"
    try:
        yield
    finally:
        del os.environ["CKPT_HOST"]


def all_of(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def save(folder: Path, layout: str, rank: int) -> None:
    """By all ranks, or by one whose state is whole."""
    if layout != "one rank":
        with build_checkpointer("sync") as checkpointer:
            checkpointer.save({**placed(layout, values()), "about": {"step": 3}}, folder)
    elif rank == 0:
        with build_checkpointer("sync", alone=True) as checkpointer:
            checkpointer.save({**values(), "about": {"step": 3}}, folder)
    dist.barrier()


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


def load(
    folder: Path, layout: str, rank: int, before: Before = lambda name, nbytes: None, *overrides: str
) -> tuple[bool, list[int], str]:
    """Load on all ranks; returns whether all is there, the bytes that each read, and the error, if there is one."""
    storage, error = CountedStorage(before), ""
    state = {**placed(layout, values(1)), "about": {"step": 0}}
    with build_checkpointer("sync", overrides, storage_of=lambda _: storage) as checkpointer:
        try:
            checkpointer.load(folder, state)
        except CheckpointError as failure:
            error = f"{type(failure).__name__}: {failure}"
    about = state.pop("about")
    return is_whole(state) and (bool(error) or about == {"step": 3}), all_of(storage.counted), error


def matrix(rank: int, world_size: int, folder: Path) -> None:
    """Load checkpoints of as many ranks and of one rank into every layout."""
    found = {}
    with hosts(rank):
        for number, written in enumerate(("one rank", "replicated", "fsdp", "tp")):
            path = folder / str(number)
            save(path, written, rank)
            for layout in ("replicated", "fsdp", "tp"):
                whole, counts, error = load(path, layout, rank)
                found[f"{written} to {layout}"] = [whole, counts, error, stored(path)]
    print(json.dumps(found))
