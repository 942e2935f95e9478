"""The ranks of a run: how they find each other, and what they agree on before Hydra looks at the config.

Read `meet` and `join`. Imports torch only where there are several ranks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...config.errors import HydraConfigError

if TYPE_CHECKING:
    import torch

#: Names a run's output folder in train.yaml; the same on all ranks, although their clocks differ.
RUN_NAME = "CKPT_TRAIN_RUN"
#: For hydra/job_logging=ranks: the console shows only the warnings of ranks other than 0, with the rank.
CONSOLE_LEVEL, CONSOLE_PREFIX = "CKPT_TRAIN_LEVEL", "CKPT_TRAIN_PREFIX"
#: Ranks start within seconds of each other, because their launcher has waited for all nodes before.
_MEETING_SECONDS = 300.0


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those that train together.

    Attributes:
        rank: its number; rank 0 writes the files and lines that are needed once.
        world_size: how many there are.
        local_rank: its number on this machine, which is that of its GPU.
        store: where they meet; None with one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store: Any = field(default=None, repr=False)


#: One process.
ALONE = Ranks()


def meet() -> Ranks:
    """Find the other ranks by what `torchrun` or another launcher has put into the environment.

    Sets variables of the environment that the configs read: a name for the run's output folder, the same on all ranks,
    and what the console of this rank shows.

    Raises:
        CheckpointConfigError: the environment is incomplete.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_SECONDS)))
    except ValueError as error:  # a variable is missing
        raise HydraConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but the ranks cannot meet: {error}. Start them with torchrun."
        ) from error
    # The store of torchrun outlives a restart of the ranks: their folder stays, but their addresses must not.
    if rank == 0:
        store.compare_set("ckpt_train/run", "", time.strftime("%Y-%m-%d/%H-%M-%S"))
    os.environ[RUN_NAME] = store.get("ckpt_train/run").decode()
    if rank:
        os.environ.update({CONSOLE_LEVEL: "WARNING", CONSOLE_PREFIX: f"[rank {rank}]"})
    fresh = PrefixStore(f"ckpt_train/start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), fresh)


def join(ranks: Ranks, device: torch.device, timeout: float) -> None:
    """Set up `torch.distributed`, once per process; nothing with one rank.

    Args:
        ranks: from `meet`.
        device: of this rank; CUDA gets NCCL beside gloo.
        timeout: seconds after which a collective gives up.
    """
    import torch.distributed as dist

    if ranks.world_size == 1 or dist.is_initialized():  # a sweep trains several times in one process
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=ranks.store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout),
    )


def part(ranks: Ranks) -> None:
    """Leave together with the others after a run that went well, or was stopped.

    A rank that left early would take the store along, or have `torchrun` end those that still write their result.
    """
    if ranks.world_size == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
