"""The optimizer and the course of its learning rate, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mobula.cluster.user_code import chosen
from mobula.configs.schema import LearnerConfig
from mobula.learner.optim.muon import MuonWithAdamW

Named = list[tuple[str, nn.Parameter]]


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig) -> torch.optim.Optimizer:
    """The optimizer that `learner.optimizer` names, over what is trained; vectors (biases, norms) are not decayed."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    return optimizer_maker(config)(trained, config)


def optimizer_maker(config: LearnerConfig) -> Callable[[Named, LearnerConfig], torch.optim.Optimizer]:
    """What makes the optimizer that `learner.optimizer` names.

    Raises:
        ValueError: it is the user's own, and cannot be called with its options.
    """
    given = ("named_parameters", "config")
    return chosen(OPTIMIZERS, config.optimizer, "learner.optimizer", given, config.optimizer_options)


def _adamw(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW. Source: arXiv:1711.05101."""
    return torch.optim.AdamW(_decay_groups(trained, config), **_adam_settings(config), fused=True)


def _adamw_8bit(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW with moments of a byte each. Raises ValueError where torchao is not installed."""
    try:
        from mobula.learner.optim.adamw_8bit import AdamWOfBytes
    except ModuleNotFoundError as error:
        raise ValueError(
            f"learner.optimizer=adamw_8bit needs {error.name!r}, which is not installed: "
            "pip install 'mobula[quantised]', or set learner.optimizer=adamw"
        ) from error
    return AdamWOfBytes(_decay_groups(trained, config), **_adam_settings(config))


def _muon(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    decay = config.weight_decay
    return MuonWithAdamW(trained, weight_decay=decay, momentum=config.muon_momentum, **_adam_settings(config))


OPTIMIZERS: dict[str, Callable[[Named, LearnerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


def _decay_groups(trained: Named, config: LearnerConfig) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_settings(config: LearnerConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.adam_eps}


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
