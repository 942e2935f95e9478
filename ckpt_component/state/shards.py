"""The parts of a DTensor or ShardedTensor (FSDP2, FSDP1) that this rank holds, as regions of the whole tensor."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointStageError
from .tensors import has_plain_bytes


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


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own, and its class says which tensors it is made of.

    DTensors, jagged tensors and results that a collective still has to deliver say so too, and are not meant.
    """
    return (
        hasattr(type(tensor), "__tensor_flatten__")
        and not has_plain_bytes(tensor)
        and not is_spread(tensor)
        and not tensor.is_nested
        and not _is_awaited(tensor)
    )


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor is made of, by name; empty for any other tensor."""
    if not is_made_of_tensors(tensor):
        return {}
    whole: Any = tensor
    return {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of this rank that have the memory of a tensor: itself, its local parts, or what these are made of."""
    dense, waiting = [], [part for part, _ in local_parts(tensor, "a tensor")]
    while waiting:
        part = waiting.pop()
        if has_plain_bytes(part):
            dense.append(part)
        elif parts := parts_of(part):
            waiting += [local for each in parts.values() for local, _ in local_parts(each, "a tensor")]
        else:
            dense.append(part)
    return dense


def context_of(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What a tensor is, beside the tensors that it is made of, as plain data; nothing is made of it here.

    Returns:
        Names and values, as pairs, because a dict would be flattened. `class`: its name. `context`, `shape` and
        `stride`: what its `__tensor_unflatten__` takes. `dtype`: as it says.
    """
    whole: Any = tensor
    return (
        ("class", _name_of(type(tensor))),
        ("context", _described(whole.__tensor_flatten__()[1])),
        ("shape", tuple(tensor.shape)),
        ("stride", tuple(tensor.stride())),
        ("dtype", tensor.dtype),
    )


def read_context(value: Any) -> dict[str, Any] | None:
    """What a checkpoint has from `context_of`, by name; None: it is something else."""
    is_valid = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return {name: each for name, each in value if isinstance(name, str)} if is_valid else None


def _described(value: Any) -> Any:
    """A context with enums, dataclasses, functions and classes by name; the rest as it is, to be encoded or refused."""
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _name_of(type(value)), **fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": _name_of(type(value)), **{name: _described(each) for name, each in value._asdict().items()}}
    if isinstance(value, (type, types.FunctionType)):
        return _name_of(value)
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    if isinstance(value, dict):
        return {name: _described(each) for name, each in value.items()}
    return value


def _name_of(value: type | types.FunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_awaited(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)
