"""Save and restore DTensors of one rank with another default device, and save them in inference mode: `placed.py PRESET`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_component import build_checkpointer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def state_of(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters()]:
            part = distribute_tensor(torch.full_like(parameter, value), mesh, [Shard(0)])
            setattr(model, name, torch.nn.Parameter(part))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


state = state_of(3.0)
state["optimizer"].step()
with torch.device("meta"), build_checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(state, "one")
with torch.inference_mode(), build_checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(state, "two")
for name in ("one", "two"):
    fresh = state_of(0.0)
    with torch.device("meta"), build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.load(name, fresh)
    for one, other in zip(state["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        moments = [each["optimizer"].state[parameter]["exp_avg"] for each, parameter in ((state, one), (fresh, other))]
        assert torch.equal(moments[0].to_local(), moments[1].to_local())
    fresh["optimizer"].step()
    print("restored", name)
dist.destroy_process_group()
