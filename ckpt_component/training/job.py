"""Everything that trains, built from the config, and the state of it that goes into checkpoints."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from ..config.errors import CheckpointConfigError
from .model import Gpt, loss_of
from .sampler import WindowSampler, cut, windows_in
from .schedule import CosineSchedule, build_optimizer
from .schema import Data, Device, Model, Precision, Train, read
from .state import Progress, RngState, seed_all
from .text import Text, load_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: mean loss of the step's batches; on the device, so that nothing waits for it.
        norm: of the gradients before clipping; on the device too.
        lr: learning rate.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    lr: float


class Job:
    """One training run without its checkpoints.

    Args:
        config: with the nodes `train`, `data` and `model`.
        base_dir: the folder that a relative `data.path` starts from.

    Attributes:
        settings: the node `train`.
        device: where it trains.
        optimizer: AdamW.
        progress: steps and tokens done.
        state: everything that the next step depends on; objects with `state_dict()` and `load_state_dict()`.

    Raises:
        CheckpointConfigError: a value that cannot be used, in one sentence.
    """

    def __init__(self, config: DictConfig, base_dir: str) -> None:
        self.settings = settings = read(config, "train", Train)
        data, size = read(config, "data", Data), read(config, "model", Model)
        _one_process_only()
        self.device = pick_device(settings.device, settings.dtype)
        path = None if data.path is None else os.path.join(base_dir, data.path)
        self._text = load_text(path, data.max_bytes, data.validation, size.context)
        self._context = size.context
        self._threads = use_threads(settings.threads)
        seed_all(settings.seed)
        self.model: nn.Module = Gpt(size).to(self.device)
        self.optimizer = build_optimizer(self.model, settings)
        self._schedule = CosineSchedule(
            self.optimizer,
            settings.lr,
            settings.lr * settings.min_lr_ratio,
            settings.warmup_steps,
            settings.decay_steps,
        )
        self._sampler = WindowSampler(windows_in(self._text.train, size.context), settings.seed, self._text.fingerprint)
        self.progress = Progress()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self._schedule,
            "rng": RngState(self.device),
            "data": self._sampler,
            "progress": self.progress,
        }

    @property
    def text(self) -> Text:
        """What it trains on."""
        return self._text

    def describe(self) -> str:
        """The run in one line."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        where = f"{self._threads} CPU threads" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        return (
            f"{parameters / 1e6:.2f} M parameters in {self.settings.dtype.value} on {where}, "
            f"{len(self._text.train) / 1e6:.2f} MB of text from {self._text.source}"
        )

    def train_step(self) -> StepResult:
        """One optimizer step over `accumulate` batches."""
        settings = self.settings
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for _ in range(settings.accumulate):
            windows = self._sampler.take(settings.batch_size)
            loss = self._loss(self._text.train, windows) / settings.accumulate
            loss.backward()
            total += loss.detach()
        # An infinite limit clips nothing and still measures.
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        lr = self._schedule.advance()
        self.optimizer.step()
        self.progress.step += 1
        self.progress.tokens += settings.accumulate * settings.batch_size * self._context
        return StepResult(total, norm, lr)

    def validation_loss(self) -> float | None:
        """The mean loss on text that is never trained on; None without such text. Uses no random numbers."""
        text, size = self._text.validation, self.settings.batch_size
        count = windows_in(text, self._context) if len(text) else 0
        if not count:
            return None
        stride = max(count // (self.settings.eval_batches * size), 1)
        chosen = torch.arange(0, count, stride)[: self.settings.eval_batches * size]
        self.model.eval()
        with torch.no_grad():
            sums = [self._loss(text, windows) * len(windows) for windows in chosen.split(size)]
        return float(torch.stack(sums).sum() / len(chosen))

    def _loss(self, text: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        inputs, targets = cut(text, windows, self._context)
        half = self.settings.dtype is Precision.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            return loss_of(self.model, inputs.to(self.device), targets.to(self.device))


def pick_device(wanted: Device, dtype: Precision) -> torch.device:
    """The device to train on.

    Raises:
        CheckpointConfigError: it is not there, or cannot compute in `dtype`.
    """
    there = torch.cuda.is_available()
    if wanted is Device.cuda and not there:
        raise CheckpointConfigError(
            "train.device=cuda, but torch finds no CUDA device on this machine; use train.device=auto or cpu."
        )
    if wanted is Device.cpu or not there:
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if dtype is Precision.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise CheckpointConfigError(
            f"train.dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it; use float32."
        )
    return device


def use_threads(wanted: int | None) -> int:
    """Let torch use this many CPU threads, or the cores that this process may run on. Returns how many."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:  # which torch has read by itself
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


def _one_process_only() -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise CheckpointConfigError(
            f"WORLD_SIZE={world}, but this job trains in one process; start it without torchrun."
        )
