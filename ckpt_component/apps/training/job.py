"""Everything that trains, built from the config, and the state of it that goes into checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from ...config.errors import HydraConfigError, for_hydra
from ...saving.folders import expanded
from ...state.per_rank import PerRank
from .model import Gpt, loss_of
from .parallel import choose
from .ranks import ALONE, Ranks, join
from .sampler import WindowSampler, cut, windows_in
from .schedule import CosineSchedule, build_optimizer, renew_settings
from .schema import Data, Device, Model, Precision, Train, read, read_parallel
from .state import Progress, RngState, seed_all
from .text import Text, load_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: mean loss of the step's batches, of this rank's part; on the device, so that nothing waits for it.
        norm: of the gradients before clipping; on the device too.
        lr: learning rate.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    lr: float


class Job:
    """One training run without its checkpoints.

    Args:
        config: with the nodes `train`, `data` and `model`, and the key `parallel`.
        base_dir: the folder that a relative `data.path` starts from.
        ranks: who trains together; `torch.distributed` is set up for them.

    Attributes:
        settings: the node `train`.
        ranks: who trains together.
        device: where it trains.
        optimizer: AdamW.
        progress: steps and tokens done.
        state: everything that the next step depends on; objects with `state_dict()` and `load_state_dict()`.

    Raises:
        CheckpointConfigError: a value that cannot be used, in one sentence.
    """

    def __init__(self, config: DictConfig, base_dir: str, ranks: Ranks = ALONE) -> None:
        self.settings = settings = read(config, "train", Train)
        data, size = read(config, "data", Data), read(config, "model", Model)
        self._kind = read_parallel(config)
        self.ranks = ranks
        self.device = pick_device(settings.device, settings.dtype, ranks)
        join(ranks, self.device, settings.timeout)
        self._parallel = parallel = choose(self._kind, ranks, self.device)
        with for_hydra():
            path = None if data.path is None else os.path.join(base_dir, expanded(data.path, "data.path"))
        self._text = load_text(path, data.max_bytes, data.validation, size.context)
        self._context = size.context
        self._threads = use_threads(settings.threads)
        seed_all(settings.seed)
        model = Gpt(size).to(self.device)
        self.model: nn.Module = model
        self._called = parallel.wrap(model)
        self.optimizer = build_optimizer(self.model, settings, parallel.foreach)
        if ranks.rank and not parallel.alike:
            seed_all(settings.seed + ranks.rank)  # of dropout; rank 0 goes on as one process would
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
            "rng": PerRank(
                RngState(self.device, alike=None if ranks.world_size == 1 else parallel.alike),
                when_resized="first" if parallel.alike else "keep",
            ),
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
        if self.ranks.world_size > 1:
            where = f"{self.ranks.world_size} ranks (parallel={self._kind.value}), {where} each"
        return (
            f"{parameters / 1e6:.2f} M parameters in {self.settings.dtype.value} on {where}, "
            f"{len(self._text.train) / 1e6:.2f} MB of text from {self._text.source}"
        )

    def train_step(self) -> StepResult:
        """One optimizer step over `accumulate` batches."""
        settings = self.settings
        self._called.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for number in range(settings.accumulate):
            windows, weight = self._parallel.share(self._sampler.take(settings.batch_size))
            with self._parallel.backward(self._called, last=number + 1 == settings.accumulate):
                loss = self._loss(self._text.train, windows) * weight / settings.accumulate
                loss.backward()
            total += loss.detach()
        # An infinite limit clips nothing and still measures.
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = self._parallel.clip(self.model.parameters(), limit)
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
        self._called.eval()
        sums = []
        with torch.no_grad():
            for windows in chosen.split(size):
                mine, weight = self._parallel.share(windows)
                sums.append(self._loss(text, mine) * weight * len(windows))
        return float(self._parallel.mean(torch.stack(sums).sum()) / len(chosen))

    def mean_loss(self, losses: Sequence[torch.Tensor]) -> float:
        """The mean of the losses of some steps, over all ranks; all of them must call it. Waits for the device."""
        return float(self._parallel.mean(torch.stack(list(losses)).mean()))

    def resumed(self) -> None:
        """Have the config's settings count, and not those that came with the checkpoint."""
        renew_settings(self.optimizer, self.settings, self._parallel.foreach)

    def _loss(self, text: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        inputs, targets = cut(text, windows, self._context)
        half = self.settings.dtype is Precision.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            return loss_of(self._called, inputs.to(self.device), targets.to(self.device))


def pick_device(choice: Device, dtype: Precision, ranks: Ranks = ALONE) -> torch.device:
    """The device to train on; of several GPUs the one of this rank.

    Raises:
        CheckpointConfigError: it is not there, or cannot compute in `dtype`.
    """
    available = torch.cuda.is_available()
    if choice is Device.cuda and not available:
        raise HydraConfigError(
            "train.device=cuda, but torch finds no CUDA device on this machine; use train.device=auto or cpu."
        )
    if choice is Device.cpu or not available:
        return torch.device("cpu")
    if ranks.world_size > 1:
        count = torch.cuda.device_count()
        if ranks.local_rank >= count:
            raise HydraConfigError(
                f"Rank {ranks.rank} is number {ranks.local_rank} on this machine, which has {count} GPU(s); "
                f"start at most {count} with --nproc-per-node, or use train.device=cpu."
            )
        torch.cuda.set_device(ranks.local_rank)
    device = torch.device("cuda", torch.cuda.current_device())
    if dtype is Precision.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise HydraConfigError(f"train.dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it; use float32.")
    return device


def use_threads(count: int | None) -> int:
    """Let torch use this many CPU threads, or the cores that this process may run on. Returns how many."""
    if count is not None:
        torch.set_num_threads(count)
    elif "OMP_NUM_THREADS" not in os.environ:  # which torch has read by itself
        sharing = os.environ.get("LOCAL_WORLD_SIZE", "1")
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // (int(sharing) if sharing.isdigit() else 1), 1))
    return torch.get_num_threads()
