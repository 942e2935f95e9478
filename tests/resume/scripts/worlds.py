"""Ranks that save and resume a model under DDP or FSDP2, on other numbers of ranks, and by pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_component import CheckpointError, build_checkpointer

LAYERS = ("one", "two", "three")


class Layers(nn.Module):
    """Layers by name."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.children():
            inputs = layer(inputs)
        return inputs


def named(order: tuple[str, ...]) -> Layers:
    """Layers of one shape, declared in an order; the values are the layers' own."""
    layers = Layers()
    for name in order:
        layer = nn.Linear(5, 5, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(25.0).view(5, 5) / 100 + LAYERS.index(name))
        layers.add_module(name, layer)
    return layers


def wrapped(kind: str, model: Layers) -> nn.Module:
    """The model under DDP, or sharded, or as it is."""
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps whose gradients are the layers' own, the same on all ranks."""
    for step in range(steps):
        for name, weight in model.named_parameters():
            parameter: Any = weight
            layer = next(each for each in LAYERS if each in name.split("."))
            gradient = torch.full(parameter.shape, 1.0 + LAYERS.index(layer) + step)
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor, on each rank."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return found


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The weight, first moment and step of each layer."""
    found = {}
    for name, parameter in model.named_parameters():
        layer = next(each for each in LAYERS if each in name.split("."))
        state = optimizer.state[parameter]
        found[layer] = [whole(each).clone() for each in (parameter, state["exp_avg"], state["step"])]
    return found


def make(kind: str, order: tuple[str, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = wrapped(kind, named(order))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save(rank: int, world_size: int, folder: Path) -> None:
    """Save a model of each kind after two steps."""
    with build_checkpointer("sync") as checkpointer:
        for kind in ("plain", "DDP", "FSDP2"):
            model, optimizer = make(kind, LAYERS)
            train(model, optimizer, 2)
            checkpointer.save({"model": model, "optimizer": optimizer}, folder / kind)


def resume(rank: int, world_size: int, folder: Path) -> None:
    """Load each into each, with the layers declared in another order, and go on as the run that was not stopped."""
    expected, plain = make("plain", LAYERS)
    train(expected, plain, 2)
    right = moments(expected, plain)
    kinds = ("plain", "DDP", "FSDP2")
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        for saved in kinds:
            for kind in kinds:
                model, optimizer = make(kind, LAYERS[::-1])
                checkpointer.load(folder / saved, {"model": model, "optimizer": optimizer}, strict=True)
                assert checkpointer.last_load is not None
                assert sorted(checkpointer.last_load.proven) == ["model", "optimizer"], (saved, kind)
                for name, values in moments(model, optimizer).items():
                    for one, other in zip(values, right[name], strict=True):
                        assert torch.equal(one, other), (saved, kind, name)


def stages(rank: int, world_size: int, folder: Path) -> None:
    """Each rank has layers of its own, and an optimizer of them."""
    layers = [LAYERS[:2], LAYERS[2:]][rank]
    model, optimizer = make("plain", layers)
    train(model, optimizer, 2)
    with build_checkpointer("sync") as checkpointer:
        try:
            checkpointer.save({"model": model, "optimizer": optimizer}, folder / "mixed")
        except CheckpointError as error:
            print(error)
        checkpointer.save({"model": model, f"optimizer_{rank}": optimizer}, folder / "stages")
