"""The learning rate: a linear warm-up, then a cosine down to a floor; and AdamW, which it drives."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn

from .schema import Train

logger = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, settings: Train, foreach: bool | None = None) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, biases and norms do not. `foreach` is AdamW's."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), foreach=foreach)


class CosineSchedule:
    """Sets the learning rate before every step.

    Args:
        optimizer: whose groups get it.
        peak: the highest rate.
        floor: the rate from `decay_steps` on.
        warmup_steps: the step that first has the highest rate.
        decay_steps: the step that first has the lowest.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, peak: float, floor: float, warmup_steps: int, decay_steps: int
    ) -> None:
        self._optimizer = optimizer
        self._shape = {"peak": peak, "floor": floor, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
        self._step = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        peak, floor, warmup, decay = self._shape.values()
        if step <= warmup:
            return peak * step / warmup
        if step >= decay:
            return floor
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (decay - warmup)))

    def advance(self) -> float:
        """Go to the next step, and return its rate."""
        self._step += 1
        rate = self.rate(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def state_dict(self) -> dict[str, Any]:
        """The steps done, and the shape of the schedule."""
        return {"step": self._step, **self._shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of a state. Where its shape differs, the config's counts, with a warning."""
        self._step = state["step"]
        for name, value in self._shape.items():
            if state[name] != value:
                logger.warning(
                    "the schedule's %s was %s in the checkpoint and is %s from now on",
                    name,
                    state[name],
                    value,
                )


def renew_settings(optimizer: torch.optim.AdamW, settings: Train, foreach: bool | None = None) -> None:
    """Put the config's weight decay, and this run's `foreach`, into an optimizer that got the checkpoint's."""
    for group in optimizer.param_groups:
        group["foreach"] = foreach
        decays = any(parameter.dim() >= 2 for parameter in group["params"])
        decay = settings.weight_decay if decays else 0.0
        if group["weight_decay"] != decay:
            logger.warning(
                "AdamW's weight_decay was %s in the checkpoint and is %s from now on",
                group["weight_decay"],
                decay,
            )
            group["weight_decay"] = decay
