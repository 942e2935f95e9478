"""Ranks, each of them on a host of its own, load together: what each of them reads from storage is counted."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_component import CheckpointError, build_checkpointer, build_manager, load_weights
from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.processes.serve import Reply
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
    found: dict[str, torch.Tensor] = {}
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
    path: Path,
    layout: str,
    before: Before = lambda name, nbytes: None,
    *overrides: str,
    objects: tuple[str, ...] = ("about",),
) -> tuple[bool, list[int], str]:
    """Load on all ranks; returns whether all is there, the bytes that each read, and the error, if there is one."""
    storage, error = CountedStorage(before), ""
    state: dict[str, Any] = {**placed(layout, values(1)), **{key: {"step": 0} for key in objects}}
    with build_checkpointer("sync", overrides, storage_of=lambda _: storage) as checkpointer:
        try:
            checkpointer.load(path, state)
        except CheckpointError as failure:
            error = f"{type(failure).__name__}: {failure}"
    about = [state.pop(key) for key in objects]
    return (
        is_whole(state) and (bool(error) or all(value == {"step": 3} for value in about)),
        all_of(storage.counted),
        error,
    )


def restored(folder: Path) -> list[Any]:
    """What a manager restores."""
    settings = [f"checkpoint.dir={folder}", "checkpoint.save.every_steps=1"]
    with build_manager("async_persistent", settings) as manager:
        manager.save(1, placed("replicated", values()))
    storage, state = CountedStorage(), placed("replicated", values(1))
    with build_manager("async_persistent", settings, storage_of=lambda _: storage) as manager:
        error = "" if manager.restore(state) == 1 else "nothing was restored"
    return [is_whole(state), all_of(storage.counted), error, stored(folder)]


def matrix(rank: int, world_size: int, folder: Path) -> None:
    """Load checkpoints of as many ranks and of one rank into every layout."""
    found = {}
    with hosts(rank):
        for number, written in enumerate(("one rank", "replicated", "fsdp", "tp")):
            path = folder / str(number)
            save(path, written, rank)
            for layout in ("replicated", "fsdp", "tp"):
                whole, counts, error = load(path, layout)
                found[f"{written} to {layout}"] = [whole, counts, error, stored(path)]
        found["a run"] = restored(folder / "run")
    print(json.dumps(found))


@contextmanager
def watching(flips: int | None = None) -> Iterator[list[int]]:
    """Gives the most batches that this rank had for others at a time, and the bytes of the largest; flips one bit."""
    from ckpt_component.hosts.batches import SharedBatches  # which loads on one host do not import

    sends, serves = Channel.send_bytes, SharedBatches.serve
    count, held, most = iter(range(1 << 30)), Counter[int](), [0, 0]

    def send_bytes(channel: Channel, data: memoryview, deadline: float = math.inf) -> None:
        if next(count) == flips:
            data = memoryview(bytearray(data))
            data[len(data) // 2] ^= 4
        most[1] = max(most[1], data.nbytes)
        sends(channel, data, deadline)

    def serve(batches: Any, channel: Channel, rank: int, number: int) -> Iterator[Reply]:
        answers = serves(batches, channel, rank, number)
        yield next(answers)  # which waits until the batch was read
        held[number] += 1
        most[0] = max(most[0], len([each for each, ranks in held.items() if ranks]))
        yield from answers
        held[number] -= 1

    classes: Any = Channel, SharedBatches
    classes[0].send_bytes, classes[1].serve = send_bytes, serve
    try:
        yield most
    finally:
        classes[0].send_bytes, classes[1].serve = sends, serves


def troubles(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 has a trouble in each load; prints what came of it on every rank."""
    found = {}

    def attempt(name: str, before: Before, *overrides: str, path: Path = folder / "whole") -> None:
        nothing = lambda name, nbytes: None  # noqa: E731
        whole, counts, error = load(path, "replicated", before if rank == 1 else nothing, *overrides)
        found[name] = [all_of(whole), counts, all_of(error), stored(path)]

    def fails_at(*numbers: int) -> Before:
        count = iter(range(1 << 30))

        def before(name: str, nbytes: int) -> None:
            if next(count) in numbers:
                raise CheckpointUnreadableError(f"{name} is not here today.")

        return before

    def waits(seconds: float, number: int | None = None) -> Before:
        count = iter(range(1 << 30))
        return lambda name, nbytes: time.sleep(seconds if number in (None, next(count)) else 0)

    with hosts(rank):
        save(folder / "whole", "replicated", rank)
        with watching() as most:
            attempt("fine", waits(0))
        found["most"] = all_of(most)
        attempt("cannot read once", fails_at(2))
        attempt("slow", waits(0.01))
        for name, override in (("flip", "checkpoint.verify=on_read"), ("flip, unverified", "checkpoint.verify=off")):
            with watching(flips=3 if rank == 1 else None):
                attempt(name, waits(0), override)
        attempt("hangs", waits(5, 2), "checkpoint.timeouts.stall=2")
        attempt("off", waits(0), "checkpoint.read_once=off")
        attempt("cannot read", fails_at(*range(1000)))
        attempt("afterwards", waits(0))
        if rank == 0:
            data = max(folder.glob("whole/*.distcp"), key=lambda path: path.stat().st_size)
            damaged = bytearray(data.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            data.write_bytes(damaged)
        dist.barrier()
        attempt("damaged", waits(0))
    with hosts(0):
        save(folder / "other", "replicated", rank)
        attempt("one host", waits(0), path=folder / "other")
    print(json.dumps(found))


def system_reads_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def own_files(rank: int, world_size: int, folder: Path) -> None:
    """Files of another program: the same ones for all hosts, and then those that each host has under one path."""
    path, found = folder / "model.safetensors", {}
    with hosts(rank):
        if rank == 0:
            save_file(values(), path)
        dist.barrier()
        for name, verify in (("together", "on_read"), ("unverified", "off")):
            whole, counts, error = load(path, "replicated", lambda *_: None, f"checkpoint.verify={verify}", objects=())
            found[name] = [all_of(whole), counts, error, path.stat().st_size]
        before, model = system_reads_so_far(), torch.nn.Module()
        for key, value in placed("replicated", values(1)).items():
            model.register_buffer(key.replace(".", "_"), value)
        load_weights(model, path, key="", rename={"layer.*": "layer_*"})
        weights = {key.replace("_", ".") if "_" in key else key: value for key, value in model.state_dict().items()}
        found["weights"] = [all_of(is_whole(weights)), all_of(system_reads_so_far() - before), "", path.stat().st_size]
        own = folder / f"host{rank}"
        own.mkdir()
        os.chdir(own)  # of the same size, under the same relative path
        save_file(values(rank), "model.safetensors")
        state = placed("replicated", values(100))
        with build_checkpointer("sync") as checkpointer:
            checkpointer.load("model.safetensors", state)
        found["own"] = all_of(is_whole(state, rank))
    print(json.dumps(found))


def killed(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is killed while it reads for the others, who have all bytes nevertheless, and an error in time."""
    with hosts(rank):
        save(folder / "whole", "replicated", rank)
        count = iter(range(1 << 30))

        def before(name: str, nbytes: int) -> None:
            if rank == 1 and next(count) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        storage, error = CountedStorage(before), ""
        state: dict[str, Any] = placed("replicated", values(1))
        checkpointer = build_checkpointer("sync", ["checkpoint.timeouts.heartbeat=2"], storage_of=lambda _: storage)
        try:
            checkpointer.load(folder / "whole", state)
        except CheckpointError as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps([is_whole(state), storage.counted, error, stored(folder / "whole")]), flush=True)
        (folder / f"{rank}.done").touch()
        until = time.monotonic() + 20
        while rank == 0 and len([*folder.glob("*.done")]) < world_size - 1 and time.monotonic() < until:
            time.sleep(0.05)  # the store lives in this process
        os._exit(0)


def system_reads(rank: int, world_size: int, folder: Path) -> None:
    """What each process reads of one large tensor, with all and then alone."""

    with hosts(rank):
        with build_checkpointer("sync", alone=True) as checkpointer:
            if rank == 0:
                checkpointer.save({"large": torch.randn(4 << 20)}, folder / "one")
        dist.barrier()
        counts = []
        with build_checkpointer("sync") as checkpointer:
            checkpointer.load(folder / "one", {"large": torch.zeros(4 << 20)})  # what is imported at the first load
            for alone in (False, True):
                before = system_reads_so_far()
                checkpointer.load(folder / "one", {"large": torch.zeros(4 << 20)}, alone=alone)
                counts.append(system_reads_so_far() - before)
        print(json.dumps(all_of([*counts, stored(folder / "one")])))


def one_host(rank: int, world_size: int, folder: Path) -> None:
    """Whether loads on one host import what shares reads between hosts."""
    with hosts(0):
        save(folder / "one", "replicated", rank)
        whole, _, error = load(folder / "one", "replicated")
        model = torch.nn.Linear(2, 2)
        if rank == 0:
            save_file(model.state_dict(), folder / "weights.safetensors")
        dist.barrier()
        load_weights(model, folder / "weights.safetensors", key="")
    print(json.dumps([whole, error, "ckpt_component.hosts.share" in sys.modules]))
