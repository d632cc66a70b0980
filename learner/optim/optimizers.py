"""The optimizer and the learning-rate schedule of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mobula.cluster.user_code import chosen
from mobula.configs.schema import LearnerConfig
from mobula.learner.optim.muon import MuonWithAdamW
from mobula.learner.optim.rounded_adamw import RoundedAdamW

Named = list[tuple[str, nn.Parameter]]


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig) -> torch.optim.Optimizer:
    """Builds the optimizer of `learner.optimizer` over the trained parameters; vectors (biases, norms) do not decay."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    return optimizer_maker(config)(trained, config)


def optimizer_maker(config: LearnerConfig) -> Callable[[Named, LearnerConfig], torch.optim.Optimizer]:
    """Returns the function that builds the optimizer of `learner.optimizer`.

    Raises:
        ValueError: a user's optimizer cannot be called with its options.
    """
    given = ("named_parameters", "config")
    return chosen(OPTIMIZERS, config.optimizer, "learner.optimizer", given, config.optimizer_options)


def _adamw(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW. Source: arXiv:1711.05101."""
    if config.master_dtype == "bfloat16":
        return RoundedAdamW(_decay_groups(trained, config), **_adam_settings(config))
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

    Depends only on the step, so that there is no scheduler state to save and a resumed run is exact.
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
