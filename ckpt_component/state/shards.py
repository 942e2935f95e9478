"""Which parts of a tensor this rank holds: boxes of the whole, as DTensor and ShardedTensor (FSDP2, FSDP1) cut it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointStageError


@dataclass(frozen=True)
class Shard:
    """Where a local tensor lies in the whole one.

    Attributes:
        shape: of the whole tensor.
        offsets: of the local part's first element, one per dimension.
    """

    shape: torch.Size
    offsets: tuple[int, ...]


def local_parts(tensor: torch.Tensor, key: str) -> list[tuple[torch.Tensor, Shard | None]]:
    """As `local_part`, for tensors of which a rank may hold several parts, or none."""
    if _is_sharded(tensor):
        sharded: Any = tensor
        whole = torch.Size(sharded.metadata().size)
        # An empty part must not stand where another one begins.
        shards = [shard for shard in sharded.local_shards() if shard.tensor.numel() or not whole.numel()]
        return [
            (
                shard.tensor,
                None if shard.tensor.shape == whole else Shard(whole, tuple(map(int, shard.metadata.shard_offsets))),
            )
            for shard in shards
        ]
    mesh = mesh_of(tensor)
    return [] if mesh is not None and mesh.get_coordinate() is None else [local_part(tensor, key)]


def local_part(tensor: torch.Tensor, key: str) -> tuple[torch.Tensor, Shard | None]:
    """The memory that this rank holds of a tensor, and which part of the whole that is (None: it is the whole).

    Raises:
        CheckpointStageError: a DTensor with partial sums, which is no value yet.
    """
    if mesh_of(tensor) is None:
        return tensor, None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = tensor
    if any(placement.is_partial() for placement in placed.placements):
        raise CheckpointStageError(
            f"'{key}' is a DTensor with partial sums ({placed.placements}); redistribute it before the save."
        )
    local = placed.to_local()
    shape, offsets = compute_local_shape_and_global_offset(placed.shape, placed.device_mesh, placed.placements)
    if tuple(shape) != tuple(local.shape):
        raise CheckpointStageError(
            f"'{key}' should have the local shape {tuple(shape)} by its placements {placed.placements}, and has "
            f"{tuple(local.shape)}."
        )
    if tuple(local.shape) == tuple(placed.shape):
        return local, None
    return local, Shard(torch.Size(placed.shape), tuple(int(offset) for offset in offsets))


def mesh_of(tensor: torch.Tensor) -> Any:
    """The mesh of ranks that a DTensor is placed on; None for other tensors."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor's maker has imported it
    return tensor.device_mesh if module is not None and isinstance(tensor, module.DTensor) else None


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether its parts are on several ranks: a DTensor or a ShardedTensor."""
    return _is_sharded(tensor) or mesh_of(tensor) is not None


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a ShardedTensor, of which most of torch refuses even to ask for a shape."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def check_mesh(mesh: Any, key: str, world_size: int) -> None:
    """Refuse a DTensor of which a rank holds a part that does not save with this one."""
    ranks = mesh.mesh.flatten().tolist()
    if max(ranks) >= world_size:
        raise CheckpointStageError(
            f"'{key}' is a DTensor with a part on rank {max(ranks)}, and this manager or checkpointer was built for "
            f"{world_size} rank(s); build it after init_process_group()."
        )


Box = tuple[Sequence[int], Sequence[int]]


def overlap(one: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
    """What two boxes (offsets, sizes) have in common.

    Returns:
        The slices of the first, those of the second, and the number of elements; None where there is nothing.
    """
    first, second, elements = [], [], 1
    for a, size_a, b, size_b in zip(one[0], one[1], other[0], other[1], strict=True):
        start, stop = max(a, b), min(a + size_a, b + size_b)
        if start >= stop:
            return None
        first.append(slice(start - a, stop - a))
        second.append(slice(start - b, stop - b))
        elements *= stop - start
    return tuple(first), tuple(second), elements
