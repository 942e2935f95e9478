"""Every key of the training job: its type, default and range, and one line on what it does.

Imports no torch, so that `ckpt-train --help` and shell completion are fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from ckpt_component.config.config_files import recipe_dir
from ckpt_component.config.hydra.composable import composable
from ckpt_component.config.hydra.compose import plain_dict
from ckpt_component.config.hydra.hydra_errors import HydraConfigError
from ckpt_component.config.hydra.read import read as read_values
from ckpt_component.config.hydra.store import (
    PROVIDER,
    SCHEMAS,
    register as register_checkpoint_configs,
    registered,
    store_files,
)
from ckpt_component.config.quantities import BYTES, SECONDS, above, at_least, within
from ckpt_component.core.options import Range


class TrainDevice(Enum):
    """Where training runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Dtype of forward and backward; weights and optimizer state are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Parallel(Enum):
    """What is split over several ranks: batches, batches and parameters, or the matrices of a block."""

    ddp = "ddp"
    fsdp = "fsdp"
    tp = "tp"


def fraction(default: float) -> float:
    """A field from 0 to 1."""
    return within(Range(0, 1), default)


@dataclass
class Train:
    """The config below `train`."""

    steps: int = at_least(1, 100)
    """The last step, counted from the start of training, also after a resume."""
    batch_size: int = at_least(1, 16)
    """Windows of text per forward pass, of all ranks together."""
    accumulate: int = at_least(1, 1)
    """Batches per step (gradient accumulation)."""
    lr: float = above(0, 3e-3)
    """The highest learning rate."""
    min_lr_ratio: float = fraction(0.1)
    """The learning rate after the decay, as a fraction of the highest."""
    warmup_steps: int = at_least(0, 20)
    """Steps in which the learning rate rises to its highest."""
    decay_steps: int = at_least(1, 2000)
    """The step at which the cosine decay ends; independent of train.steps, so that a run can be extended exactly."""
    weight_decay: float = at_least(0, 0.1)
    """AdamW's weight decay, for matrices only."""
    clip_norm: float | None = above(0, 1.0)
    """The norm to which gradients are clipped; null: no clipping."""
    dtype: Precision = Precision.float32
    """Dtype of forward and backward: `float32` or `bfloat16`."""
    device: TrainDevice = TrainDevice.auto
    """Where training runs: `cpu`, `cuda`, or `auto` (CUDA if available)."""
    timeout: float = above(0, 600.0, SECONDS)
    """Timeout of collectives with several ranks, in seconds."""
    requeue_exit_code: int = within(Range(1, 255), 85)
    """Exit code after SIGUSR1 or SIGUSR2, by which a scheduler warns a job: the last step is saved, queue it again."""
    threads: int | None = at_least(1, None)
    """CPU threads of torch; null: torch's default."""
    seed: int = at_least(0, 1234)
    """Seed of the weights, of dropout, and of the order of the text."""
    log_every: int = at_least(1, 10)
    """Log the loss every n-th step."""
    eval_every: int | None = at_least(1, 50)
    """Compute the validation loss every n-th step; null: never."""
    eval_batches: int = at_least(1, 8)
    """Batches for the validation loss."""


@dataclass
class Data:
    """The config below `data`."""

    path: str | None = None
    """A file or a folder of text; null: the sources of Python's standard library."""
    max_bytes: int = at_least(1, 8_000_000, BYTES)
    """Bytes of the text to use at most."""
    validation: float = fraction(0.05)
    """The fraction of the text, at its end, that is held out for the validation loss."""


@dataclass
class Model:
    """The config below `model`: a decoder-only GPT on bytes."""

    layers: int = at_least(1, MISSING)
    """Number of transformer blocks."""
    heads: int = at_least(1, MISSING)
    """Number of attention heads per block; must divide the width."""
    width: int = at_least(1, MISSING)
    """The size of a token's vector."""
    context: int = at_least(1, MISSING)
    """Length of a window in bytes."""
    dropout: float = fraction(0.0)
    """Dropout probability in training."""


@dataclass
class Settings:
    """Keys of `ckpt-train` besides `checkpoint`."""

    train: Train = field(default_factory=Train)
    """The training loop."""
    data: Data = field(default_factory=Data)
    """The text."""
    model: Model = field(default_factory=Model)
    """The size of the model."""
    parallel: Parallel = Parallel.ddp
    """How the ranks of a torchrun split the work; ignored with one process."""
    objectives: Any = "stall_s"
    """What a job returns to a sweeper: the name of a figure in its `result.json`, or a list of names."""


def register() -> None:
    """Register the schemas of checkpoints and of the training job with Hydra."""
    register_checkpoint_configs()
    if registered("train"):
        return
    store = ConfigStore.instance()
    for name, schema in (("train", Train), ("data", Data), ("model", Model)):
        store.store(group=SCHEMAS, name=name, node=composable(schema), provider=PROVIDER)
    # Stored here rather than on Hydra's search path, which all apps share.
    conf = Path(__file__).parent / "conf"
    store_files(conf, None)
    store_files(conf / "model", "model")
    store_files(recipe_dir() / "train", "recipe", "_global_")


def read(config: DictConfig) -> Settings:
    """Convert the config to dataclasses; unrelated keys are ignored.

    Raises:
        CheckpointConfigError: a key has no value, or one that is out of range
    """
    values = plain_dict(config, resolve=True)
    for key in ("train", "data", "model"):
        if not isinstance(values[key], dict):
            raise HydraConfigError(f"{key} cannot itself be {values[key]}; set its keys, as --help lists them.")
    return read_values(Settings, {item.name: values[item.name] for item in fields(Settings) if item.name in values}, "")
