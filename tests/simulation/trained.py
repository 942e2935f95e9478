"""The checkpoints of a small training run on a disk, and the weights that each step has, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from kept_configs import compose_once

from ckpt_component import build_checkpointer
from ckpt_component.config.hydra.resolve import resolve_config
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.testing import Disk, SimulatedFiles

CHECKPOINTS, MODEL = "/run", "/model"
#: Checkpoints whose weights differ in some elements. After these: one like the last of them, one that differs
#: everywhere, and one whose vocabulary is larger.
ALIKE = 8
SAME, ALL_NEW, LARGER = ALIKE, ALIKE + 1, ALIKE + 2
COUNT = ALIKE + 3
CONFIG = {"config.json": b'{"model_type": "small", "dtype": "float32"}\n', "tokenizer.json": b'{"words": 40}\n'}


class Trained:
    """What was trained and saved, which nothing here changes.

    Attributes:
        weights: of each checkpoint, by name
        files: their storage, which a publisher reads
    """

    def __init__(self) -> None:
        self._disk = Disk()
        files = SimulatedFiles(self._disk)
        self.weights: list[Mapping[str, bytes]] = []
        config = resolve_config(
            compose_once(
                "sync",
                [
                    "checkpoint.save.at_end=false",
                    "checkpoint.writer.workers=1",
                    "checkpoint.events=false",
                    "checkpoint.timeouts.close=20",
                ],
            )
        )
        with build_checkpointer(config, storage_of=lambda path: files) as checkpointer:
            for number, model in enumerate(_models()):
                optimizer = {f"exp_avg.{name}": tensor.float() * 2 for name, tensor in model.items()}
                state = {"model": model, "optimizer": optimizer, "step": number, "note": f"checkpoint {number}"}
                checkpointer.save(state, path_of(number))
                self.weights.append({name: bytes_of(tensor) for name, tensor in model.items()})

    def host(self) -> Disk:
        """A new disk of the host that publishes: it has the config of the model."""
        files = SimulatedFiles(Disk())
        files.make_folders(MODEL)
        for name, data in CONFIG.items():
            files.write_new(f"{MODEL}/{name}", data)
        files.sync_folder(MODEL)
        return files.disk

    @property
    def files(self) -> SimulatedFiles:
        return SimulatedFiles(self._disk)


def path_of(number: int) -> str:
    """The path of a checkpoint."""
    return f"{CHECKPOINTS}/{MEGATRON.folder(number + 1)}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _models() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    models = [_model(40, generator)]
    for number in range(1, ALIKE):
        model = {name: tensor.clone() for name, tensor in models[-1].items()}
        for name in [*model][number % 2 :: 2]:
            flat = model[name].view(-1)
            if flat.numel():  # a few elements; of bfloat16 mostly the low bits, as a small step of an optimizer does
                chosen = torch.randperm(flat.numel(), generator=generator)[: max(flat.numel() // 12, 1)]
                flat[chosen] = (flat[chosen].double() * 1.01 + 1).to(flat.dtype)
        models.append(model)
    return [*models, {**models[-1]}, _model(40, generator), _model(44, generator)]


def _model(words: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "embed.weight": random(words, 33).bfloat16(),
        **{f"layers.{number}.weight": random(24 + number, 33) for number in range(3)},
        "norm.bias": random(33).half(),
        "rotary.positions": torch.randint(0, 99, (5,), generator=generator),
        "scale": random(1).reshape(()),
        "unused": torch.empty(0, 4),
        "mask": torch.randint(0, 2, (7,), generator=generator).bool(),
    }


def described(data: bytes) -> Any:
    """What a JSON file says."""
    return json.loads(data)
