"""How several ranks share the work of a step: `ddp`, `fsdp`, `tp`, each by what PyTorch ships for it.

In all of them parameters keep the names, the order and the whole shapes of one process, so every checkpoint of
`checkpoint/writer=dcp` resumes under every one of them and on every number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from ...config.errors import HydraConfigError
from .model import Gpt
from .ranks import Ranks
from .schema import Parallel


class Parallelism:
    """One process, which has nothing to share; the others differ from it in a few places.

    Args:
        ranks: who takes part; they have joined.
        device: of this rank.

    Attributes:
        alike: whether all ranks see the same text, and so must draw the same random numbers.
        foreach: `foreach` of the optimizer.
    """

    alike = True
    foreach: bool | None = None

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device

    def wrap(self, model: Gpt) -> nn.Module:
        """Prepare the model, in place; returns what is called in its stead."""
        return model

    def share(self, windows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """This rank's part of a batch, and the weight of its mean loss, by which the mean over ranks is the batch's."""
        return windows, 1.0

    def backward(self, called: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Surrounds forward and backward of one batch; ranks exchange gradients in the `last` one of a step."""
        return contextlib.nullcontext()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks' parts; all ranks must call it."""
        return value

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
        """Clip the gradients to a norm; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(parameters, limit)


class DataParallel(Parallelism):
    """`ddp`: every rank has the whole model, and a part of every batch."""

    alike = False

    def wrap(self, model: Gpt) -> nn.Module:
        """See `Parallelism.wrap`. The model itself stays as it is, and so do the keys of its state."""
        where = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=where)

    def share(self, windows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """See `Parallelism.share`. A rank that gets nothing takes a window for no weight: all must take part."""
        mine = windows.tensor_split(self.ranks.world_size)[self.ranks.rank]
        if not len(mine):
            return windows[:1], 0.0
        return mine, len(mine) * self.ranks.world_size / len(windows)

    def backward(self, called: nn.Module, last: bool) -> AbstractContextManager[object]:
        """See `Parallelism.backward`."""
        if last or not isinstance(called, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return called.no_sync()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """See `Parallelism.mean`."""
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total / self.ranks.world_size


class FullySharded(DataParallel):
    """`fsdp`: a part of every batch, and a part of every parameter, gathered block by block when it is used."""

    def wrap(self, model: Gpt) -> nn.Module:
        """See `Parallelism.wrap`. Embedding and head share a tensor, so one group, the outermost, has them both."""
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh(self.device, self.ranks)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def backward(self, called: nn.Module, last: bool) -> AbstractContextManager[object]:
        """See `Parallelism.backward`."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(called, FSDPModule):
            called.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
        """See `Parallelism.clip`."""
        return _clip_sharded(parameters, limit)


class TensorParallel(Parallelism):
    """`tp`: every rank has a part of every block's matrices, and sees all of every batch.

    Embedding, head and norms are small and stay whole on every rank.
    """

    foreach = False  # one kernel for many tensors cannot mix DTensors with plain ones

    def wrap(self, model: Gpt) -> nn.Module:
        """See `Parallelism.wrap`."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if model.heads % self.ranks.world_size:
            raise HydraConfigError(
                f"parallel=tp shares out model.heads={model.heads}, which {self.ranks.world_size} ranks do not divide; "
                "use a number of ranks that does, or parallel=fsdp."
            )
        mesh = _mesh(self.device, self.ranks)
        for block in model.blocks:
            plan = {
                "attention.qkv": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(block, mesh, plan)
        return model

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
        """See `Parallelism.clip`."""
        return _clip_sharded(parameters, limit)


def choose(parallel: Parallel, ranks: Ranks, device: torch.device) -> Parallelism:
    """What `parallel` names; with one rank there is nothing to choose."""
    if ranks.world_size == 1:
        return Parallelism(ranks, device)
    kinds = {Parallel.ddp: DataParallel, Parallel.fsdp: FullySharded, Parallel.tp: TensorParallel}
    return kinds[parallel](ranks, device)


def _mesh(device: torch.device, ranks: Ranks) -> torch.distributed.device_mesh.DeviceMesh:
    return torch.distributed.device_mesh.init_device_mesh(device.type, (ranks.world_size,))


def _clip_sharded(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """`clip_grad_norm_` for DTensors and plain tensors side by side, which it refuses."""
    from torch.distributed.tensor import DTensor

    used = [parameter for parameter in parameters if parameter.grad is not None]
    kinds = [
        [parameter for parameter in used if isinstance(parameter.grad, DTensor)],
        [parameter for parameter in used if not isinstance(parameter.grad, DTensor)],
    ]
    norms = []
    for kind in filter(None, kinds):
        norm = nn.utils.get_total_norm([parameter.grad for parameter in kind if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for kind in filter(None, kinds):
        nn.utils.clip_grads_with_norm_(kind, limit, total)
    return total
