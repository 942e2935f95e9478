"""What ranks do in `test_state_dict_saver.py`."""

from __future__ import annotations

import errno
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_component.compat.async_queue import AsyncCallsQueue
from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.compat.file_system_writer_async import FileSystemWriterAsync
from ckpt_component.compat.state_dict_saver import (
    CheckpointMetadataCache,
    SaveRanks,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.errors import CheckpointSaveError, RanksError

warnings.simplefilter("ignore")


def whole(rows: int = 7) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)


def sharded(value: float = 0.0, rows: int = 7) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "uneven": distribute_tensor(whole(rows) + value, mesh, [Shard(0)]),
        "some_empty": distribute_tensor(torch.ones(1, 4) + value, mesh, [Shard(0)]),
        "alike": distribute_tensor(whole() + value, mesh, [Replicate()]),
        "plain": torch.full((5,), value),
        "step": int(value),
    }


class FullAtTheEnd(FileStorage):
    """Has no room for `.metadata`."""

    def write_over(self, path: str, data: bytes) -> None:
        if ".metadata" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().write_over(path, data)


class Full(FileStorage):
    """Has no room."""

    def create(self, path: str, size: int = 0) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Counted:
    """Counts collectives that gather or scatter plans and results."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("gather_object", "scatter_object"):
            setattr(SaveRanks, name, self._counting(getattr(SaveRanks, name)))

    def _counting(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(*args, **kwargs)

        return call


def save(path: Path, values: dict[str, Any], cache: CheckpointMetadataCache | None = None, **options: Any) -> None:
    planned = save_state_dict_async_plan(
        values, FileSystemWriterAsync(path, **options), planner=DefaultSavePlanner(), metadata_cache=cache, timeout=60
    )
    function, preload, args = planned[0].get_save_function_and_args()
    if function is not None and preload is not None:
        function(args[0], preload(), *args[2:])
    save_state_dict_async_finalize(*planned)


def check(path: Path, value: float, rows: int = 7, extra: tuple[str, ...] = ()) -> None:
    target = sharded(-1.0, rows) | {name: torch.zeros(2) for name in extra}
    dcp.load(target, checkpoint_id=path)
    full = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in target.items()}
    assert torch.equal(full["uneven"], whole(rows) + value)
    assert torch.equal(full["some_empty"], torch.ones(1, 4) + value)
    assert torch.equal(full["alike"], whole() + value)
    assert torch.equal(full["plain"], torch.full((5,), value))
    assert full["step"] == int(value)
    for name in extra:
        assert torch.equal(full[name], torch.full((2,), value))


def in_the_background(rank: int, world: int, folder: Path) -> None:
    """Three saves at a time by a queue, with a state that changes after each was scheduled."""
    calls, cache, values = AsyncCallsQueue(persistent=True, start_method="fork"), CheckpointMetadataCache(), sharded()
    for number in range(3):
        planned = save_state_dict_async_plan(
            values, FileSystemWriterAsync(folder / str(number), thread_count=2), metadata_cache=cache, timeout=60
        )
        function, preload, args = planned[0].get_save_function_and_args()
        request = AsyncRequest(function, args, [], preload_fn=preload)
        request.add_finalize_fn(partial(save_state_dict_async_finalize, *planned))
        assert calls.schedule_async_request(request) == number
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value += 1
        values["step"] += 1
    assert calls.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    calls.close()
    for number in range(3):
        check(folder / str(number), float(number))
    cache.close()


def cached(rank: int, world: int, folder: Path) -> None:
    """A known structure costs no gather; a new key, a new size on one rank, another placement are noticed."""
    cache, collectives = CheckpointMetadataCache(), Counted()
    save(folder / "0", sharded(0.0), cache)
    assert collectives.count == 3  # plans, their parts, results
    save(folder / "1", sharded(1.0), cache)
    assert collectives.count == 3
    added = sharded(2.0) | {"new": torch.full((2,), 2.0)}
    save(folder / "2", added, cache)
    assert collectives.count == 6
    save(folder / "3", sharded(3.0, rows=9), cache)
    assert collectives.count == 9
    save(folder / "4", sharded(4.0, rows=9), cache)
    assert collectives.count == 9
    check(folder / "0", 0.0)
    check(folder / "1", 1.0)
    check(folder / "2", 2.0, extra=("new",))
    check(folder / "3", 3.0, rows=9)
    check(folder / "4", 4.0, rows=9)
    on_one = sharded(5.0) | ({f"of-{rank}": torch.ones(2)} if rank == 1 else {})
    save(folder / "5", sharded(5.0), cache)
    count = collectives.count
    save(folder / "6", on_one, cache)
    assert collectives.count == count + 3
    target = {"of-1": torch.zeros(2)}
    dcp.load(target, checkpoint_id=folder / "6")
    assert torch.equal(target["of-1"], torch.ones(2))
    cache.close()


def other_ranks(rank: int, world: int, folder: Path) -> None:
    """A cache outlives the process group: in the next one the ranks have changed places."""
    cache = CheckpointMetadataCache()
    save(folder / "before", sharded(0.0), cache)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=world - 1 - rank, world_size=world)
    save(folder / "after", sharded(1.0), cache)
    check(folder / "after", 1.0)
    cache.close()


def errors(rank: int, world: int, folder: Path) -> None:
    """Whatever fails on one rank is raised on all, soon, and the next save works."""
    cache = CheckpointMetadataCache()
    saves: list[dict[str, Any]] = [
        {"fs_ops": FullAtTheEnd()},  # the coordinator cannot finish, with plans and results gathered
        {"fs_ops": Full() if rank == 1 else None},
        {"overwrite": False, "path": folder / ("taken" if rank == 0 else "free")},
        {},
        {"fs_ops": FullAtTheEnd()},  # and with all known
    ]
    for number, options in enumerate(saves):
        path = options.pop("path", folder / str(number))
        if "overwrite" in options and rank == 0:
            path.mkdir()
            (path / ".metadata").touch()
        start = time.monotonic()
        try:
            save(path, sharded(float(number)), cache, **options)
            assert not {"fs_ops", "overwrite"} & set(options)
        except CheckpointSaveError as error:
            assert isinstance(error, RanksError), error
            assert list(error.failures) == [1 if number == 1 else 0], error.failures
            assert ("No space left" in str(error)) == (number != 2)
            assert (error.errno == errno.ENOSPC) == (number != 2)
        else:
            assert number == 3
            check(path, 3.0)
        assert time.monotonic() - start < 30
        assert (path / ".metadata").exists() == (number == 3 or (number == 2 and rank == 0))
    cache.close()
    without = sharded(9.0) | ({"meta": torch.empty(1, device="meta")} if rank == 1 else {})
    try:
        save(folder / "refused", without)
        raise AssertionError("a meta tensor was saved")
    except RanksError as error:
        assert "'meta' is on the meta device" in str(error) and list(error.failures) == [1]


def in_a_group(rank: int, world: int, folder: Path) -> None:
    """Two groups of ranks save at the same time, each for itself."""
    groups = [dist.new_group([number]) if world == 2 else None for number in range(world)]
    everyone = dist.new_group([0, 1])
    values = {"a": torch.full((3,), float(rank))}
    for name, group in (("own", groups[rank]), ("together", everyone)):
        path = folder / f"{name}-{rank if name == 'own' else 0}"
        planned = save_state_dict_async_plan(values, FileSystemWriterAsync(path), group, timeout=60)
        function, preload, args = planned[0].get_save_function_and_args()
        if function is not None and preload is not None:
            function(args[0], preload(), *args[2:])
        save_state_dict_async_finalize(*planned)
    own = {"a": torch.zeros(3)}
    dcp.load(own, checkpoint_id=folder / f"own-{rank}", no_dist=True)
    assert torch.equal(own["a"], values["a"])


def one_after_the_other(rank: int, world: int, folder: Path) -> None:
    """Those that wait for nothing, in one start of the ranks."""
    for function in (cached, errors, in_a_group):
        (folder / function.__name__).mkdir(exist_ok=True)
        function(rank, world, folder / function.__name__)
