"""Train with torchao's optimizers and weights, and die by SIGKILL after a save: `low_bit.py FOLDER KIND STEPS [DIE_AT]`.

Each step's loss is printed in hex, so that two runs can be compared to the bit.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from ckpt_component import build_manager

OPTIMIZERS: dict[str, Any] = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}


def make(kind: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model and its optimizer; `int8`: quantized weights that stay, below layers that train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if kind == "int8":
        quantize_(model[0], Int8WeightOnlyConfig())
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model[2].parameters(), lr=0.01)
    return model, OPTIMIZERS[kind](model.parameters(), lr=0.01)


def main(folder: str, kind: str, steps: int, die_at: int = -1) -> None:
    """Train from where the folder's newest checkpoint is."""
    model, optimizer = make(kind)
    if kind == "int8" and die_at < 0:
        with torch.no_grad():  # other weights than those that were saved
            quantized: Any = model[0].weight
            quantized.qdata.zero_()
    overrides = ["checkpoint.load.prove=on_read"]
    with build_manager("async_persistent", dir=folder, overrides=overrides) as manager:
        state = {"model": model, "optimizer": optimizer}
        start = manager.restore(state) or 0
        for step in range(start + 1, steps + 1):
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - inputs.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item().hex(), flush=True)
            manager.save(step, state)
            if step == die_at:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
