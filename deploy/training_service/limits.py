"""ServiceLimits: bounds of requests, queues and waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds of one service. A tenant's models count while their session sends heartbeats."""

    max_models: int  # of a tenant, active at once
    max_rank: int  # of an adapter
    max_rows: int  # of one request
    max_tokens: int  # of all rows of one request
    max_batch_tokens: int  # of one call of the learner, unless one request alone has more
    max_queued: int  # requests of a model that are not finished
    max_samples: int  # sequences of a tenant that are not finished
    max_request_bytes: int
    max_served: int  # adapters that the engines hold at once
    snapshot_steps: int  # optimizer steps between two snapshots of an adapter
    learner_s: float  # deadline of one call of the learner
    sample_s: float  # deadline of one sampling request
    recovery_s: float  # a request fails when the learner has been unavailable this long
    poll_s: float  # a request for a result is answered after this time, finished or not
    session_idle_s: float  # without a heartbeat for this long a session's adapters leave the learner
