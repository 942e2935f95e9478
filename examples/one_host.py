"""Training on several hosts, each with a disk, and with copies of another one's snapshots. Its argument: steps.

examples/hosts.sh runs it on four hosts that are one machine.
"""

import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpt_component import CheckpointListener, LoadReport, SaveReport, build_manager

OVERRIDES = [
    "checkpoint/recovery=peers",
    "checkpoint.recovery.every_steps=1",  # a snapshot in memory after each step, and
    "checkpoint.save.every_steps=10",  # and after each tenth one on the disk of each host, uploaded to dir
    "checkpoint.local.dir=disks/${oc.env:CKPT_HOST}/run",  # on several machines: /scratch/run
    "checkpoint.timeouts.heartbeat=10",  # s; a lost host is noticed sooner than usual
]
PLACES = {"memory": "memory", "peer": "memory, also that of other hosts", "storage": "disk"}


class Told(CheckpointListener):
    """Prints what examples/hosts.sh shows."""

    def on_restored(self, report: LoadReport) -> None:
        """Say where this rank's state came from."""
        print(f"{host}: step {report.step} from {PLACES[report.source]}", flush=True)

    def on_at_peers(self, report: SaveReport) -> None:
        """Say what other hosts have copies of."""
        print(f"{host}: step {report.step} is at its peers", flush=True)


host, steps = os.environ["CKPT_HOST"], int(sys.argv[1])
dist.init_process_group("gloo")
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = (torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with build_manager("async_persistent", OVERRIDES, dir="shared/run") as manager:
    manager.add_listener(Told())
    start = manager.restore(state) or 0
    for step in range(start + 1, start + 1 + steps):
        inputs = torch.randn(32, 256)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()  # waits for the other hosts
        optimizer.step()
        manager.maybe_save(step, state)
        time.sleep(0.1)
print(f"{host}: trained steps {start + 1} to {start + steps}")
dist.destroy_process_group()
