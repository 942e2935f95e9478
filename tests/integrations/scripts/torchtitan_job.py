"""torchtitan's own Trainer, model (Llama 3) and command line, on CPUs with gloo, and with random text.

    torchtitan_job.py LOSSES [flags of torchtitan]

SIGNAL=SIGKILL SIGNAL_AT=3 sends every rank that signal in step 3. LOSSES-<rank> gets a line per step: the step and the loss
as hexadecimal text.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

# torchtitan asks for an accelerator at import, and takes CUDA where there is none.
torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
}.items():
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, value)

from torchtitan import train as titan
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class RandomText(BaseDataLoader):
    """Batches that depend on how many came before, which is its state."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any) -> None:
        self.shape, self.key, self.count = (local_batch_size, seq_len + 1), f"dp_rank_{dp_rank}", 0
        self.seed = dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            numbers = torch.Generator().manual_seed(1000 * self.seed + self.count)
            self.count += 1
            text = torch.randint(0, 2048, self.shape, generator=numbers)
            yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {self.key: {"count": self.count}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state[self.key]["count"]


class Losses(MetricsProcessor):
    """Writes the losses, and kills the process after a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        with open(f"{LOSSES}-{os.environ['RANK']}", "a") as lines:
            lines.write(f"{step} {global_avg_loss.hex()}\n")


def tiny() -> Trainer.Config:
    config = config_registry.llama3_debugmodel()
    config.tokenizer, config.dataloader, config.metrics = (
        NoTokenizer.Config(),
        RandomText.Config(),
        Losses.Config(log_freq=1),
    )
    config.debug.seed = 0
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, 6
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.activation_checkpoint = None
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    del config.model_spec.model.layers[2:]
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 2, False
    return config


without_sum = FSDPModule.set_gradient_divide_factor


def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
    """Gloo has no reduction that divides; torch then sums, and divides by itself."""
    self.set_force_sum_reduction_for_comms(True)
    without_sum(self, factor)


FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]
dist_utils.set_pg_timeouts = lambda **kwargs: None  # its barrier names a device, which gloo refuses
LOSSES = sys.argv.pop(1)
config_registry.tiny = tiny
sys.argv[1:1] = ["--module", "llama3", "--config", "tiny"]
if "SIGNAL" in os.environ:
    without = Trainer.train_step

    def train_step(self: Trainer, *args: Any) -> None:
        if self.step == int(os.environ["SIGNAL_AT"]):
            self.checkpointer._manager.wait()  # the checkpoint before is committed
            torch.distributed.barrier()
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
        without(self, *args)

    Trainer.train_step = train_step
titan.main()
