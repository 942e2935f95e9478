"""The parts of a DTensor or ShardedTensor (FSDP2, FSDP1) that this rank holds, as regions of the whole tensor."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointStageError


@dataclass(frozen=True)
class Shard:
    """The position of a local tensor in the whole one.

    Attributes:
        shape: shape of the whole tensor
        offsets: offsets of the local part's first element, one per dimension
    """

    shape: torch.Size
    offsets: tuple[int, ...]


def local_parts(tensor: torch.Tensor, key: str) -> list[tuple[torch.Tensor, Shard | None]]:
    """Like `local_part`, for tensors of which a rank may hold several parts or none."""
    if _is_sharded(tensor):
        sharded: Any = tensor
        whole = torch.Size(sharded.metadata().size)
        # An empty part could have the same offsets as another one.
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
    """The local tensor of this rank, and which part of the whole it is (None: the whole).

    Raises:
        CheckpointStageError: a DTensor with partial sums, which has no final value yet
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
    with torch.device("cpu"):  # torch counts with tensors on the default device, which may be a busy or a meta one
        shape, offsets = compute_local_shape_and_global_offset(placed.shape, placed.device_mesh, placed.placements)
    if tuple(shape) != tuple(local.shape):
        raise CheckpointStageError(
            f"'{key}' should have the local shape {tuple(shape)} by its placements {placed.placements}, but has "
            f"{tuple(local.shape)}."
        )
    if tuple(local.shape) == tuple(placed.shape):
        return local, None
    return local, Shard(torch.Size(placed.shape), tuple(int(offset) for offset in offsets))


def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor; None for other tensors."""
    module = sys.modules.get("torch.distributed.tensor")  # if it was never imported, there are no DTensors
    return tensor.device_mesh if module is not None and isinstance(tensor, module.DTensor) else None


def holders_of_part(tensor: torch.Tensor) -> int:
    """How many ranks hold the same local part of a DTensor or ShardedTensor."""
    if mesh_of(tensor) is None:
        return 1
    placed: Any = tensor
    sizes = placed.device_mesh.mesh.shape
    return math.prod(size for size, placement in zip(sizes, placed.placements, strict=True) if placement.is_replicate())


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over ranks: a DTensor or a ShardedTensor."""
    return _is_sharded(tensor) or mesh_of(tensor) is not None


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ShardedTensor, for which most torch functions raise, even for its shape."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def check_mesh(mesh: Any, key: str, world_size: int) -> None:
    """Refuse a DTensor that has a part on a rank outside of this save."""
    ranks = mesh.mesh.flatten().tolist()
    if max(ranks) >= world_size:
        raise CheckpointStageError(
            f"'{key}' is a DTensor with a part on rank {max(ranks)}, and this manager or checkpointer was built for "
            f"{world_size} rank(s); build it after init_process_group()."
        )
