"""The ways to distribute training."""

from __future__ import annotations

from pathlib import Path

import torch

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Backend
from mobula.learner.backends.sharded import load_sharded_weights
from mobula.learner.policies.base import Policy


def build_backend(config: LearnerConfig, device: torch.device, dtype: torch.dtype, num_replicas: int = 1) -> Backend:
    """The backend that `learner.backend` names; only what it needs is imported."""
    match config.backend:
        case "fsdp2":
            from mobula.learner.backends.fsdp2 import FSDP2Backend

            return FSDP2Backend(device, dtype, config, num_replicas)
        case "deepspeed":
            from mobula.learner.backends.deepspeed import DeepSpeedBackend

            return DeepSpeedBackend(device, dtype, config)
        case "single":
            from mobula.learner.backends.single import SingleBackend

            return SingleBackend(device, dtype, config)


def load_weights(config: LearnerConfig, folder: Path, policy: Policy) -> None:
    """Read the trained parameters that the ranks of `learner.backend` saved into a policy in one process.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    if config.backend == "deepspeed":
        from mobula.learner.backends.deepspeed import load_zero_weights

        load_zero_weights(folder, policy)
    else:
        load_sharded_weights(folder, policy)
