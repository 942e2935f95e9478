"""A training loop that saves every 50 steps and resumes: run it, raise STEPS, and run it again.

python examples/loop.py
"""

import logging

import torch

from ckpt_component import build_manager

STEPS = 200

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
data = torch.Generator().manual_seed(1)
# What a resumed run needs to continue as if it had not stopped: model, optimizer, schedule, and where the data is.
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data.get_state()}

with build_manager("async_persistent", ["checkpoint.save.every_steps=50"], dir="runs/loop") as manager:
    start = manager.restore(state) or 0
    data.set_state(state["data"])
    for step in range(start + 1, STEPS + 1):
        inputs = torch.randn(32, 64, generator=data)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state["data"] = data.get_state()
        manager.maybe_save(step, state, metrics={"loss": loss.item()})
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
