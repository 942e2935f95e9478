"""Checkpoints with weights that change, and their publisher."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_component import build_checkpointer
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.storage import Storage
from ckpt_component.exporting.export import ExportOptions
from ckpt_component.publishing.publisher import Published, Publisher, PublishOptions
from ckpt_component.state.tensors import tensor_bytes

State = dict[str, torch.Tensor]


def weights_at(step: int, seed: int = 0) -> State:
    """Weights of which a part changes with each step; some never do."""
    generator = torch.Generator("cpu").manual_seed(seed)
    model = {
        "embed": torch.randn(300, 40, generator=generator, device="cpu", dtype=torch.float32).to(torch.bfloat16),
        "layers.0.weight": torch.randn(64, 64, generator=generator, device="cpu", dtype=torch.float32),
        "layers.1.weight": torch.randn(64, 64, generator=generator, device="cpu", dtype=torch.float32).half(),
        "frozen": torch.arange(500, device="cpu", dtype=torch.int64),
        "scale": torch.tensor(float(step), device="cpu", dtype=torch.float32),
        "empty": torch.empty(0, 3, device="cpu", dtype=torch.float32),
        "mask": torch.ones(33, device="cpu", dtype=torch.bool),
    }
    for each in range(1, step + 1):
        model["embed"].view(-1)[each::97] += 0.5
        model["layers.0.weight"][each % 64] *= 1.01
    return model


def save(root: Path | str, step: int, model: State, **objects: Any) -> str:
    """Save a checkpoint of a model; returns its path."""
    path = os.path.join(root, f"iter_{step:07d}")
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"model": model, **objects}, path)
    return path


def bytes_of(model: State) -> dict[str, bytes]:
    return {name: bytes(tensor_bytes(tensor)) for name, tensor in model.items()}


#: Options of the weights, and not of the publisher.
_OF_EXPORT = ("dtype", "rename", "ignore", "prefix", "max_shard_bytes", "config_from")


def publisher(
    to: Path | str,
    mirror: Path | str,
    run: str = "",
    fs: FileStorage | None = None,
    storage: Storage | None = None,
    process: str = "trainer",
    **options: Any,
) -> Publisher:
    """A publisher as a new process has it."""
    export = {name: options.pop(name) for name in _OF_EXPORT if name in options}
    chosen = PublishOptions(ExportOptions("hf", **export), **options)
    run = hashlib.sha256(run.encode()).hexdigest()[:16]
    storage = storage or storage_at(to, process=process)
    return Publisher(storage, str(to), str(mirror), chosen, run, fs or FileStorage())


def publish(made: Publisher, path: str, step: int) -> Published:
    return made.publish(storage_at(path), path, step, time.time())
