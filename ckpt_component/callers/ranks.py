"""What this rank needs of the others: one sum. Imports no torch; without `torch.distributed` there is one rank."""

from __future__ import annotations

import sys
from types import ModuleType


def world_size() -> int:
    """How many ranks there are now."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())


def rank() -> int:
    """Which one this is."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def sum_over_ranks(value: int) -> int:
    """Sum of an integer over all ranks of the default group; a collective when there are several.

    The tensor lies where the group communicates: on the CPU where it can (gloo), else on the current device. A CPU job
    makes no CUDA call.
    """
    dist = _distributed()
    if dist is None or dist.get_world_size() == 1:
        return value
    import torch

    # For example "cpu:gloo,cuda:nccl", or "cuda:nccl".
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config()).split(",")]
    if "cpu" in kinds:
        device = torch.device("cpu")
    else:
        device = torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
    total = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total.item())


def _distributed() -> ModuleType | None:
    dist = sys.modules.get("torch.distributed")  # whoever uses it has imported it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist
