"""AdamW and the course of its learning rate, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from configs.schema import LearnerConfig
from learner.backends.base import Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; vectors (biases, norms) are not decayed. Source: arXiv:1711.05101."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)


def learning_rate(config: LearnerConfig, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0): linear over `warmup_steps`, then by `schedule` towards 0 at the end.

    A function of the step alone, so there is no scheduler to save and a resumed run goes on exactly.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 1.0)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - progress)
        case "cosine":
            return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
