"""The ways to distribute training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Backend
from mobula.learner.backends.sharded import saved_sharded_weights


def build_backend(config: LearnerConfig, device: torch.device, dtype: torch.dtype, num_replicas: int = 1) -> Backend:
    """Builds the backend of `learner.backend`; imports only the libraries of this backend."""
    match config.backend:
        case "fsdp2":
            from mobula.learner.backends.native import FSDP2Backend

            return FSDP2Backend(device, dtype, config, num_replicas)
        case "deepspeed":
            from mobula.learner.backends.deepspeed import DeepSpeedBackend

            return DeepSpeedBackend(device, dtype, config)
        case "single":
            from mobula.learner.backends.native import SingleBackend

            return SingleBackend(device, dtype, config)


def saved_weights(config: LearnerConfig, folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name in the policy -> reader of each whole tensor that the ranks of `learner.backend` saved: what is trained, and
    buffers."""
    if config.backend == "deepspeed":
        from mobula.learner.backends.deepspeed import saved_zero_weights

        return saved_zero_weights(folder)
    return saved_sharded_weights(folder)
