"""Split the work of a step over several ranks with PyTorch's own `ddp`, `fsdp` and `tp`.

All three keep the names, order and global shapes of the parameters of a single process, so a checkpoint of
`checkpoint/writer=dcp` resumes under any of them and on any number of ranks.

FSDP and DTensor are imported where several ranks need them, because that takes most of a second.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckpt_component.config.hydra.hydra_errors import HydraConfigError

from .model import Gpt
from .ranks import Ranks
from .schema import Parallel


def parallelize(model: Gpt, kind: Parallel, ranks: Ranks, device: torch.device) -> nn.Module:
    """Prepare a model for several ranks, in place.

    Returns:
        The module to call instead of the model. The keys of the model's own state do not change.

    Raises:
        CheckpointConfigError: the number of heads is not divisible by the number of ranks
    """
    if ranks.world_size == 1:
        return model
    if kind is Parallel.ddp:
        return nn.parallel.DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    if kind is Parallel.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)  # embedding and head share a tensor, so they must be in one group
        return model
    if model.heads % ranks.world_size:
        raise HydraConfigError(
            f"parallel=tp shares out model.heads={model.heads}, which {ranks.world_size} ranks do not divide; "
            "use a number of ranks that does, or parallel=fsdp."
        )
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:  # embedding, head and norms are small and stay whole on every rank
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


def share(windows: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, float]:
    """This rank's part of a batch, and the weight of its mean loss, so that the mean over ranks is the batch's mean.

    A rank without a part gets one window with weight 0, because all ranks must take part in collectives.
    """
    part = windows.tensor_split(ranks.world_size)[ranks.rank]
    return (part, len(part) * ranks.world_size / len(windows)) if len(part) else (windows[:1], 0.0)


def mean(value: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The mean over the ranks, a collective operation."""
    if ranks.world_size == 1:
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / ranks.world_size


def clip(parameters: Iterable[nn.Parameter], limit: float, ranks: Ranks) -> torch.Tensor:
    """Clip the gradients to a norm; returns their norm before clipping."""
    if ranks.world_size == 1:
        return nn.utils.clip_grad_norm_(parameters, limit)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():  # `tp` mixes DTensors and plain tensors
        norm = nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
