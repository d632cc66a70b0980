"""ServiceLimits: bounds of requests, queues and waits."""

from __future__ import annotations

from typing import Self

from mobula.configs.schema import RunConfig, TrainingServiceConfig

MAX_CHECKPOINTS = 4096  # of whole weights that can be sampled: engines hold one of them and load the others from disk


class ServiceLimits(TrainingServiceConfig):
    """The keys of `training_service`, and the bounds that follow from other keys."""

    max_rank: int
    """Of an adapter."""
    max_served: int
    """Adapters that the engines hold at once."""
    learner_s: float
    """Deadline of one call of the learner."""
    sample_s: float
    """Deadline of one sampling request."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Returns the bounds that a configuration sets."""
        own, timeouts, adapters = config.training_service, config.timeouts, config.sampler.adapters
        is_full = own.weights == "full"
        return cls(
            **dict(own) | {"max_models": 1 if is_full else own.max_models},
            max_rank=adapters.max_rank,
            max_served=MAX_CHECKPOINTS if is_full else adapters.max_served,
            learner_s=timeouts.start_s + timeouts.update_s,  # ranks that were lost start again within a call
            sample_s=own.recovery_s + timeouts.rollout_s,
        )
