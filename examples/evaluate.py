"""Use what examples/loop.py has saved, without training: evaluate its newest checkpoint.

    python examples/loop.py && python examples/evaluate.py

`ckpt export hf runs/loop exported` writes its weights to `model.safetensors`, in little memory whatever their size.
"""

import torch

from ckpt_component import load_weights

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
# The newest checkpoint of the run, or a path such as runs/loop/iter_0000150. Nothing else of it is read.
step = load_weights(model, "runs/loop")

with torch.no_grad():
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(7))
    print(f"step {step}: loss {(model(inputs) - inputs).square().mean().item():.4f}")
