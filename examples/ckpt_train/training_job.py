"""Build everything needed for training from the config, and the state that goes into checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from ckpt_component.config.hydra.hydra_errors import HydraConfigError, for_hydra
from ckpt_component.core.storage.locate import expanded
from ckpt_component.state.paths import PerRank

from .data import WindowSampler, cut, load_text, windows_in
from .model import Gpt, loss_of
from .parallel import clip, mean, parallelize, share
from .ranks import ALONE, Ranks, join
from .schedule import build_optimizer, use_settings
from .schema import Parallel, Precision, TrainDevice, read
from .state import RngState


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: mean loss of this rank's part of the step's batches, on the device to avoid synchronization
        norm: norm of the gradients before clipping, also on the device
        lr: learning rate
    """

    loss: torch.Tensor
    norm: torch.Tensor
    lr: float


class TrainingJob:
    """A training run without its checkpoints.

    Args:
        config: config with the nodes `train`, `data` and `model`, and the key `parallel`
        base_dir: folder that a relative `data.path` starts from
        ranks: the ranks of the run, for which `torch.distributed` is initialized

    Attributes:
        settings: the node `train`
        config: all settings of the run
        leads: whether this is rank 0
        text: text to train on
        device: device to train on
        model: the GPT; its parameters may be sharded, depending on `parallel`
        optimizer: AdamW
        state: everything that the next step depends on: plain values, and objects with `state_dict()` and
            `load_state_dict()`

    Raises:
        CheckpointConfigError: a value is invalid
    """

    def __init__(self, config: DictConfig, base_dir: str, ranks: Ranks = ALONE) -> None:
        self.config = loaded = read(config)
        self._ranks = ranks
        self.leads = ranks.rank == 0
        self.settings, data, size, kind = loaded.train, loaded.data, loaded.model, loaded.parallel
        settings = self.settings
        self.device = pick_device(settings.device, ranks)
        join(ranks, self.device, settings.timeout)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        with for_hydra():
            path = None if data.path is None else os.path.join(base_dir, expanded(data.path, "data.path"))
        self.text = load_text(path, data.max_bytes, data.validation, size.context)
        self._context = size.context
        torch.manual_seed(settings.seed)  # also seeds CUDA
        self.model = Gpt(size).to(self.device)
        self._called = parallelize(self.model, kind, ranks, self.device)
        self.optimizer = build_optimizer(self.model, settings)
        #: The ranks that split batches. All ranks of `tp` see the same text and must draw the same random numbers.
        self._sharers = ALONE if kind is Parallel.tp else ranks
        same_numbers = self._sharers.world_size == 1
        if not same_numbers:
            torch.manual_seed(settings.seed + ranks.rank)  # for dropout; rank 0 draws as a single process would
        self._sampler = WindowSampler(windows_in(self.text.train, size.context), settings.seed, self.text.fingerprint)
        generators = RngState(self.device, alike=None if ranks.world_size == 1 else same_numbers)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": PerRank(generators, when_resized="first" if same_numbers else "keep"),
            "data": self._sampler,
            "progress": {"step": 0, "tokens": 0},
        }
        where = f"{torch.get_num_threads()} CPU threads" if self.device.type == "cpu" else str(self.device)
        if ranks.world_size > 1:
            where = f"{ranks.world_size} ranks (parallel={kind.value}), {where} each"
        #: The run in one line.
        self.description = (
            f"{sum(parameter.numel() for parameter in self.model.parameters()) / 1e6:.2f} M parameters in "
            f"{settings.dtype.value} on {where}, {len(self.text.train) / 1e6:.2f} MB of text from {self.text.source}"
        )

    @property
    def step(self) -> int:
        """The last completed step."""
        return int(self.state["progress"]["step"])

    def train_step(self) -> StepResult:
        """One optimizer step over `accumulate` batches."""
        settings, progress = self.settings, self.state["progress"]
        self._called.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for _ in range(settings.accumulate):
            windows, weight = share(self._sampler.take(settings.batch_size), self._sharers)
            loss = self._loss(self.text.train, windows) * weight / settings.accumulate
            loss.backward()
            total += loss.detach()
        # With an infinite limit this only measures.
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = clip(self.model.parameters(), limit, self._ranks)
        progress["step"] += 1
        progress["tokens"] += settings.accumulate * settings.batch_size * self._context
        lr = use_settings(self.optimizer, progress["step"], settings)
        self.optimizer.step()
        return StepResult(total, norm, lr)

    def validation_loss(self) -> float | None:
        """The mean loss on the validation text, or None without one. Draws no random numbers."""
        text, size = self.text.validation, self.settings.batch_size
        count = windows_in(text, self._context) if len(text) else 0
        if not count:
            return None
        stride = max(count // (self.settings.eval_batches * size), 1)
        sample = torch.arange(0, count, stride, dtype=torch.int64, device="cpu")[: self.settings.eval_batches * size]
        self._called.eval()
        sums = []
        with torch.no_grad():
            for windows in sample.split(size):
                part, weight = share(windows, self._sharers)
                sums.append(self._loss(text, part) * weight * len(windows))
        return float(mean(torch.stack(sums).sum(), self._sharers) / len(sample))

    def mean_loss(self, losses: Sequence[torch.Tensor]) -> float:
        """The mean of some steps' losses over all ranks, a collective operation. Synchronizes with the device."""
        return float(mean(torch.stack(list(losses)).mean(), self._sharers))

    def _loss(self, text: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        inputs, targets = cut(text, windows, self._context)
        half = self.settings.dtype is Precision.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            return loss_of(self._called, inputs.to(self.device), targets.to(self.device))


def pick_device(choice: TrainDevice, ranks: Ranks = ALONE) -> torch.device:
    """The device to train on; with several GPUs, the GPU of this rank.

    Raises:
        CheckpointConfigError: the device does not exist
    """
    count = torch.cuda.device_count()
    if choice is TrainDevice.cpu or (choice is TrainDevice.auto and not count):
        return torch.device("cpu")
    if ranks.local_rank >= count:
        raise HydraConfigError(
            f"train.device={choice.value}, but torch finds {count} CUDA device(s) here for rank {ranks.rank}, which is "
            f"number {ranks.local_rank} on this machine; use train.device=cpu, or a smaller --nproc-per-node."
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)
