"""What the ranks of tests/training/test_train_ranks.py run; `folder` holds text.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import torch
from ckpt_train.loop import run
from ckpt_train.ranks import Ranks
from ckpt_train.schema import register
from ckpt_train.training_job import TrainingJob
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from ckpt_component.config import config_dir
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError
from ckpt_component.state.flatten import flatten
from ckpt_component.state.paths import key_of

KINDS = ("ddp", "fsdp", "tp")
N = 3


def config_of(folder: Path, *overrides: str) -> DictConfig:
    """As `compose_job` of conftest.py, which lives in the test's process."""
    register()
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    tiny = json.loads((folder / "tiny.json").read_text())
    with initialize_config_dir(str(config_dir()), **version):
        return compose("train", [*tiny, f"data.path={folder / 'text.txt'}", *overrides])


def trained(config: DictConfig, ranks: Ranks, folder: Path) -> tuple[TrainingJob, list[float]]:
    job = TrainingJob(config, "/", ranks)
    summary = run(job, config.checkpoint, str(folder))
    return job, [loss for _, loss in [*summary.losses, *summary.validation]]


def values_of(job: TrainingJob, rank: int) -> dict[str, Any]:
    flat = flatten(job.state, rank)
    objects = zip(flat.object_paths, flat.objects, strict=True)
    tensors = zip(flat.tensor_paths, flat.tensors, strict=True)
    values = {key_of(path): str(value) for path, value in objects}
    return values | {key_of(path): tensor.clone() for path, tensor in tensors}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for key, value in one.items():
        same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert same, (key, value, other[key])


def losses(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 writes the losses of a run of every kind, without dropout, to compare them with one process."""
    ranks = Ranks(rank, world_size, rank)
    found = {}
    for kind in KINDS:
        # A batch of 3 cannot be shared evenly by 2 ranks.
        for size in (2, 3):
            over = (
                f"parallel={kind}",
                "checkpoint=off",
                "model.dropout=0",
                "train.steps=4",
                f"train.batch_size={size}",
            )
            found[f"{kind} {size}"] = trained(config_of(folder, *over), ranks, folder)[1]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))


def resumes(rank: int, world_size: int, folder: Path) -> None:
    """2N steps are N steps, resume, N steps; of every kind, on every rank, to the bit. Leaves the checkpoints."""
    ranks = Ranks(rank, world_size, rank)
    for kind in KINDS:
        over = (f"parallel={kind}", "checkpoint.save.every_steps=1")
        whole, figures = trained(config_of(folder, *over, f"train.steps={2 * N}"), ranks, folder / f"{kind}_whole")
        _, first = trained(config_of(folder, *over, f"train.steps={N}"), ranks, folder / kind)
        torch.rand(7)
        resumed, second = trained(config_of(folder, *over, f"train.steps={2 * N}"), ranks, folder / kind)
        assert figures[: 2 * N] == first[:N] + second[:N], (figures, first, second)
        assert_same(values_of(resumed, rank), values_of(whole, rank))
        sharded = {name for name, value in resumed.model.named_parameters() if isinstance(value, DTensor)}
        assert bool(sharded) == (kind != "ddp"), sharded
        others = [torch.zeros(5056 // 8, dtype=torch.int64) for _ in range(world_size)]
        torch.distributed.all_gather(others, torch.get_rng_state()[: 5056 // 8 * 8].view(torch.int64))
        alike = all(torch.equal(other, others[0]) for other in others)
        assert alike == (kind == "tp"), kind


def resumes_of_others(rank: int, world_size: int, folder: Path) -> None:
    """What another number of ranks saved, and each kind of what another kind saved."""
    ranks = Ranks(rank, world_size, rank)
    for saved, kind in (("one", "fsdp"), ("one", "tp"), ("ddp", "tp"), ("tp", "ddp"), ("tp", "fsdp"), ("fsdp", "tp")):
        if not (folder / saved).exists():
            continue
        over: tuple[str, ...] = (f"parallel={kind}", "checkpoint.save.at_end=false", "checkpoint.save.every_steps=null")
        over += (f"train.steps={2 * N + 2}", "model.dropout=0")
        _, found = trained(config_of(folder, *over), ranks, folder / saved)
        if rank == 0:
            print("LOSSES", saved, kind, json.dumps(found))
        # Replicated tensors of `tp` stay equal only where all ranks drop the same activations.
    torch.distributed.barrier()


def tp_refuses(rank: int, world_size: int, folder: Path) -> None:
    """Heads that the ranks do not divide; on all ranks, in words."""
    try:
        TrainingJob(config_of(folder, "parallel=tp", "model.heads=1"), "/", Ranks(rank, world_size, rank))
    except CheckpointConfigError as error:
        assert "parallel=tp shares out model.heads=1, which 2 ranks do not divide" in str(error)
    else:
        raise AssertionError("not refused")
