"""DDP with mixed precision, an average of the weights (EMA), and a random generator per rank.

torchrun --nproc-per-node=2 examples/ddp.py
"""

import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckpt_component import PerRank, build_manager

STEPS = 60

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
model = DistributedDataParallel(module)
average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
data = torch.Generator().manual_seed(rank)
# The checkpoint loads without DDP too. The generator differs by rank.
state = {
    "model": model,
    "average": average,
    "optimizer": optimizer,
    "scaler": scaler,
    "data": PerRank(data.get_state(), "keep"),
}

with build_manager("async_persistent", ["checkpoint.save.every_steps=20"], dir="runs/ddp") as manager:
    start = manager.restore(state) or 0
    data.set_state(state["data"].value)
    for step in range(start + 1, STEPS + 1):
        inputs = torch.randn(32, 64, generator=data).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(module)
        state["data"] = PerRank(data.get_state(), "keep")
        manager.maybe_save(step, state)
    if rank == 0 and start < STEPS:  # otherwise nothing was left to train
        print(f"steps {start + 1} to {STEPS}: loss {loss.item():.6f}")
dist.destroy_process_group()
