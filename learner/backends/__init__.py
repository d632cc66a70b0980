"""The ways to distribute training."""

from __future__ import annotations

import torch

from configs.schema import LearnerConfig
from learner.backends.base import Backend


def build_backend(config: LearnerConfig, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that `learner.backend` names; only what it needs is imported."""
    match config.backend:
        case "fsdp2":
            from learner.backends.fsdp2 import FSDP2Backend

            return FSDP2Backend(device, dtype, config)
        case "deepspeed":
            from learner.backends.deepspeed import DeepSpeedBackend

            return DeepSpeedBackend(device, dtype, config)
        case "single":
            from learner.backends.single import SingleBackend

            return SingleBackend(device, dtype, config)
