"""FSDP2 on any number of ranks: saved on two, resumed on one or four. On a machine with GPUs, one rank per GPU.

torchrun --nproc-per-node=2 examples/fsdp.py --steps 100
torchrun --nproc-per-node=4 examples/fsdp.py --steps 200
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_component import build_manager

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dir", default="runs/fsdp", help="a folder that all ranks share")
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(device)
mesh = init_device_mesh(device, (ranks,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())  # after fully_shard, which replaces the parameters
# Each rank saves its shards. What all ranks hold alike is stored once; what differs by rank needs PerRank.
state = {"model": model, "optimizer": optimizer}

with build_manager("async_persistent", ["checkpoint.save.every_steps=50"], dir=arguments.dir) as manager:
    start = manager.restore(state) or 0
    for step in range(start + 1, arguments.steps + 1):
        # Each rank takes its part of one batch, so the loss does not depend on how many there are.
        batch = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        inputs = batch.chunk(ranks)[rank].to(device)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        manager.maybe_save(step, state)
    if start < arguments.steps:  # otherwise nothing was left to train
        dist.all_reduce(loss)
        if rank == 0:
            print(f"steps {start + 1} to {arguments.steps} on {ranks} ranks: loss {loss.item() / ranks:.6f}")
dist.destroy_process_group()
