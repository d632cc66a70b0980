"""ServiceLimits: bounds of requests, queues and waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mobula.configs.schema import RunConfig

MAX_CHECKPOINTS = 4096  # of whole weights that can be sampled: engines hold one of them and load the others from disk


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds of one service. A tenant's models count while their session sends heartbeats."""

    trains_all_weights: bool  # of one model, in place of adapters
    max_models: int  # of a tenant, active at once
    max_rank: int  # of an adapter
    max_rows: int  # of one request
    max_tokens: int  # of all rows of one request
    max_batch_tokens: int  # of one call of the learner, unless one request alone has more
    max_queued: int  # requests of a model that are not finished
    max_samples: int  # sequences of a tenant that are not finished
    max_request_bytes: int
    max_dense_values: int  # of a tensor that is sent sparse
    max_served: int  # adapters that the engines hold at once
    alpha: float  # of new adapters
    kept_results: int  # of a model, on disk before its snapshot
    kept_results_s: float  # on disk at least this long
    kept_in_memory: int  # results of all models and samplers
    snapshot_steps: int  # optimizer steps between two snapshots of an adapter
    learner_s: float  # deadline of one call of the learner
    sample_s: float  # deadline of one sampling request
    recovery_s: float  # a request fails when the learner has been unavailable this long
    poll_s: float  # a request for a result is answered after this time, finished or not
    session_idle_s: float  # without a heartbeat for this long a session's adapters leave the learner

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Returns the bounds that a configuration sets."""
        own, timeouts, adapters = config.training_service, config.timeouts, config.sampler.adapters
        return cls(
            trains_all_weights=own.weights == "full",
            max_models=1 if own.weights == "full" else own.max_models,
            max_rank=adapters.max_rank,
            max_rows=own.max_rows,
            max_tokens=own.max_tokens,
            max_batch_tokens=own.max_batch_tokens,
            max_queued=own.max_queued,
            max_samples=own.max_samples,
            max_request_bytes=own.max_request_bytes,
            max_dense_values=own.max_dense_values,
            max_served=MAX_CHECKPOINTS if own.weights == "full" else adapters.max_served,
            alpha=own.alpha,
            kept_results=own.kept_results,
            kept_results_s=own.kept_results_s,
            kept_in_memory=own.kept_in_memory,
            snapshot_steps=own.snapshot_steps,
            learner_s=timeouts.start_s + timeouts.update_s,  # ranks that were lost start again within a call
            sample_s=own.recovery_s + timeouts.rollout_s,
            recovery_s=own.recovery_s,
            poll_s=own.poll_s,
            session_idle_s=own.session_idle_s,
        )
