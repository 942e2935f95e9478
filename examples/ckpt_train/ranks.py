"""The ranks of a run: rendezvous, and what they agree on before Hydra reads the config.

Read `meet` and `join`. Imports torch only if there are several ranks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ckpt_component.config.hydra.hydra_errors import HydraConfigError

if TYPE_CHECKING:
    import torch

#: Names a run's output folder in train.yaml; the same on all ranks, although their clocks differ.
RUN_NAME = "CKPT_TRAIN_RUN"
#: For hydra/job_logging=ranks: of ranks other than 0 the console shows only warnings, prefixed with the rank.
CONSOLE_LEVEL, CONSOLE_PREFIX = "CKPT_TRAIN_LEVEL", "CKPT_TRAIN_PREFIX"
#: Timeout of the rendezvous. Ranks start within seconds of each other, because their launcher waits for all nodes.
_MEETING_SECONDS = 300.0


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run.

    Attributes:
        rank: its number; rank 0 writes files and log lines that are needed only once
        world_size: number of ranks
        local_rank: its number on this machine, which selects its GPU
        store: the store of the rendezvous; None with one rank
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store: Any = field(default=None, repr=False)


#: One process.
ALONE = Ranks()


def meet() -> Ranks:
    """Find the other ranks through the environment variables of `torchrun` or another launcher.

    Sets environment variables that the configs read: a name for the run's output folder, the same on all ranks, and
    the log level and prefix of this rank's console.

    Raises:
        CheckpointConfigError: the environment is incomplete
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
    # torchrun's store survives a restart of the ranks: they keep their folder, but need a new prefix for addresses.
    if rank == 0:
        store.compare_set("ckpt_train/run", "", time.strftime("%Y-%m-%d/%H-%M-%S"))
    os.environ[RUN_NAME] = store.get("ckpt_train/run").decode()
    if rank:
        os.environ.update({CONSOLE_LEVEL: "WARNING", CONSOLE_PREFIX: f"[rank {rank}]"})
    survives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if survives else "0"  # hosts may count differently
    fresh = PrefixStore(f"ckpt_train/start_{start}", store)
    return Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), fresh)


def join(ranks: Ranks, device: torch.device, timeout: float) -> None:
    """Initialize `torch.distributed`, once per process; does nothing with one rank.

    Args:
        ranks: from `meet`
        device: this rank's device; CUDA adds NCCL to gloo
        timeout: timeout of collectives in seconds
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
    """Exit together with the other ranks after a run that completed or was stopped.

    A rank that exits early would close the store, or make `torchrun` kill ranks that still write their result.
    """
    if ranks.world_size == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
