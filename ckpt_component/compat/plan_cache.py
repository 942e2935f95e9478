"""What planning keeps from one save to the next, and the fingerprint that shows whether it still holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ..coordination import Coordinator
from ..errors import CheckpointWorldError
from .bucket_image import FilesImage


class CheckpointMetadataCache:
    """Plans, metadata, host memory and the connection to the other ranks, from one save to the next.

    Give it to each plan.

    Nothing in it is used unchecked: a plan is reused when the fingerprints of all ranks are those it was made for.
    One object for one series of saves; all ranks use theirs for the same saves.
    """

    def __init__(self) -> None:
        #: This rank's fingerprint, and the finished plan that belongs to it.
        self.plan: tuple[str, SavePlan] | None = None
        #: On the coordinator: the fingerprints of all ranks, and what they make up together.
        self.whole: tuple[list[str], Metadata] | None = None
        #: On the coordinator: digests of the results of all ranks, and the results.
        self.results: tuple[list[str], list[list[WriteResult]]] | None = None
        #: For the writers of the saves, one after the other.
        self.memory: list[FilesImage] = []
        self._coordinator: Coordinator | None = None
        self._ranks: list[int] = []
        self._saves = 0

    def next_save(self, ranks: list[int], connect: Callable[[], Coordinator]) -> tuple[Coordinator, int]:
        """The coordinator of these ranks, and a number for the save that is the same on all of them.

        Args:
            ranks: of the save. Where they or the process group are others than before, all is forgotten.
            connect: makes a coordinator of these ranks.
        """
        try:
            if self._coordinator is not None:
                self._coordinator.check_world()
        except CheckpointWorldError:
            self.close()
        if self._coordinator is None or self._ranks != ranks:
            self.close()
            self._coordinator, self._ranks = connect(), ranks
        self._saves += 1
        return self._coordinator, self._saves

    def forget(self) -> None:
        """Plan afresh next time."""
        self.plan = self.whole = self.results = None

    def close(self) -> None:
        """Give up the connection and the memory, and forget all."""
        self.forget()
        self.memory.clear()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None


def fingerprint_of(plan: SavePlan, planner: SavePlanner, state_dict: Any, world_size: int) -> str:
    """8 bytes, as hex, that change with all that a plan and its metadata depend on.

    These are keys, dtypes, shapes, strides, offsets and placements, how the planner flattened the state dict, its
    settings, and the world size.
    """
    digest = hashlib.blake2b(digest_size=8)

    def add(*values: Any) -> None:
        digest.update(repr(values).encode())

    add(world_size, type(planner).__qualname__, plan.usable)
    add(sorted((name, value) for name, value in vars(planner).items() if isinstance(value, (bool, int, str))))
    add(getattr(planner, "mappings", None))
    for item in plan.items:
        index, data = item.index, item.tensor_data
        add(index.fqn, index.offset and tuple(index.offset), index.index, item.type.name)
        if data is not None:
            chunk, kind = data.chunk, data.properties
            add(tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size), kind.dtype, kind.requires_grad)
    for path, tensor in _tensors(getattr(planner, "state_dict", state_dict), ()):
        add(path, type(tensor).__qualname__, tensor.dtype, tuple(tensor.shape), tensor.device.type)
        add(*_placement(tensor))
    return digest.hexdigest()


def digest_of(results: Sequence[WriteResult]) -> str:
    """8 bytes, as hex, that change with the places of what a rank wrote."""
    digest = hashlib.blake2b(digest_size=8)
    for result in results:
        place = result.storage_data
        digest.update(repr((result.index.fqn, place.relative_path, place.offset, place.length)).encode())
    return digest.hexdigest()


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _tensors(member, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, member in enumerate(value):
            yield from _tensors(member, (*path, number))


def _placement(tensor: Any) -> tuple[Any, ...]:
    """How a tensor lies in memory, and which part of the whole it is."""
    if hasattr(tensor, "placements"):
        mesh = tensor.device_mesh
        return tuple(tensor.to_local().stride()), tensor.placements, mesh.mesh.tolist(), mesh.mesh_dim_names
    if hasattr(tensor, "local_shards"):  # a ShardedTensor has no strides of its own
        shards = tensor.local_shards()
        return tuple((shard.metadata.shard_offsets, tuple(shard.tensor.stride())) for shard in shards)
    return (tuple(tensor.stride()),)
