"""AdamW and its learning rate: linear warm-up, then cosine decay to a minimum."""

from __future__ import annotations

import math

import torch
from torch import nn

from .schema import Train


def build_optimizer(model: nn.Module, settings: Train) -> torch.optim.AdamW:
    """AdamW with two parameter groups: weight decay for matrices, none for biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


def learning_rate(step: int, settings: Train) -> float:
    """The learning rate of a step; steps count from 1."""
    warmup, decay = settings.warmup_steps, settings.decay_steps
    if step <= warmup:
        return settings.lr * step / warmup
    floor = settings.lr * settings.min_lr_ratio
    if step >= decay:
        return floor
    return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (decay - warmup)))


def use_settings(optimizer: torch.optim.AdamW, step: int, settings: Train) -> float:
    """Set the config's learning rate and weight decay, overriding a checkpoint's; returns the learning rate."""
    rate = learning_rate(step, settings)
    for group, decay in zip(optimizer.param_groups, (settings.weight_decay, 0.0), strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    return rate
