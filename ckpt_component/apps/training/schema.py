"""Every key of the training job: its type, its default, its range, and one line on what it does.

Imports no torch, so that `ckpt-train --help` and shell completion are quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from ...config.composable import composable
from ...config.compose import plain_dict
from ...config.errors import HydraConfigError
from ...config.quantities import BYTES, SECONDS
from ...config.read import read as read_values
from ...config.schema import above, at_least, within
from ...config.store import PROVIDER, SCHEMAS, recipe_dir, registered, store_files
from ...config.store import register as register_checkpoint_configs
from ...options import Range


class Device(Enum):
    """Where training runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """What forward and backward compute in; weights and optimizer state are float32 always."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Parallel(Enum):
    """How several ranks share the work: batches, batches and parameters, or the matrices of a block."""

    ddp = "ddp"
    fsdp = "fsdp"
    tp = "tp"


def fraction(default: float) -> float:
    """A field from 0 to 1."""
    return within(Range(0, 1), default)


@dataclass
class Train:
    """The whole of `train`."""

    steps: int = at_least(1, 100)
    """The last step, counted from the start of training and not from where it resumed."""
    batch_size: int = at_least(1, 16)
    """How many windows of text one forward pass takes; of all ranks together, where there are several."""
    accumulate: int = at_least(1, 1)
    """How many such batches make up one step."""
    lr: float = above(0, 3e-3)
    """The highest learning rate."""
    min_lr_ratio: float = fraction(0.1)
    """The learning rate at the end of the decay, and from then on, as a share of the highest."""
    warmup_steps: int = at_least(0, 20)
    """Over how many steps the learning rate rises to its highest."""
    decay_steps: int = at_least(1, 2000)
    """The step at which the cosine decay ends; on its own, so that a higher train.steps goes on exactly."""
    weight_decay: float = at_least(0, 0.1)
    """AdamW's weight decay, on matrices alone."""
    clip_norm: float | None = above(0, 1.0)
    """The norm to which gradients are clipped; null: they are not."""
    dtype: Precision = Precision.float32
    """What forward and backward compute in: `float32` or `bfloat16`."""
    device: Device = Device.auto
    """Where training runs: `cpu`, `cuda`, or `auto` (CUDA when it is there)."""
    timeout: float = above(0, 600.0, SECONDS)
    """How long one of several ranks waits for the others in a collective, in seconds."""
    threads: int | None = at_least(1, None)
    """CPU threads of torch; null: as many as torch chooses."""
    seed: int = at_least(0, 1234)
    """Seed of the weights, of dropout, and of the order of the text."""
    log_every: int = at_least(1, 10)
    """Report the loss at every n-th step."""
    eval_every: int | None = at_least(1, 50)
    """Compute the validation loss at every n-th step; null: never."""
    eval_batches: int = at_least(1, 8)
    """How many batches the validation loss is taken over."""


@dataclass
class Data:
    """The whole of `data`."""

    path: str | None = None
    """A file or a folder of text; null: the sources of Python's standard library."""
    max_bytes: int = at_least(1, 8_000_000, BYTES)
    """How much of the text is used, in bytes."""
    validation: float = fraction(0.05)
    """The share of the text, at its end, that is kept for the validation loss."""


@dataclass
class Model:
    """The whole of `model`: a decoder-only GPT on bytes."""

    layers: int = at_least(1, MISSING)
    """How many transformer blocks."""
    heads: int = at_least(1, MISSING)
    """How many attention heads a block has; they share out the width."""
    width: int = at_least(1, MISSING)
    """The size of a token's vector."""
    context: int = at_least(1, MISSING)
    """How many bytes of text the model sees at once."""
    dropout: float = fraction(0.0)
    """The share of activations dropped in training."""


@dataclass
class Settings:
    """What `ckpt-train` reads beside `checkpoint`."""

    train: Train = field(default_factory=Train)
    """The training loop."""
    data: Data = field(default_factory=Data)
    """The text."""
    model: Model = field(default_factory=Model)
    """The size of the model."""
    parallel: Parallel = Parallel.ddp
    """How the ranks of a torchrun share the work; one process has no use for it."""


def register() -> None:
    """Give Hydra the schemas of the training job, and those of checkpoints before them."""
    register_checkpoint_configs()
    if registered("train"):
        return
    store = ConfigStore.instance()
    for name, schema in (("train", Train), ("data", Data), ("model", Model)):
        store.store(group=SCHEMAS, name=name, node=composable(schema), provider=PROVIDER)
    # Not on Hydra's search path, which other apps share.
    conf = Path(__file__).parent / "conf"
    store_files(conf, None)
    store_files(conf / "model", "model")
    store_files(recipe_dir() / "train", "recipe", "_global_")


def read(config: DictConfig) -> Settings:
    """The config as dataclasses; other keys than ours are left to whoever added them.

    Raises:
        CheckpointConfigError: a key has no value, or one that is out of its range.
    """
    values = plain_dict(config, resolve=True)
    for key in ("train", "data", "model"):
        if not isinstance(values[key], dict):
            raise HydraConfigError(f"{key} cannot itself be {values[key]}; set its keys, as --help lists them.")
    return read_values(Settings, {item.name: values[item.name] for item in fields(Settings) if item.name in values}, "")
