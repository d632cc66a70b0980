"""Schema of the training service: limits of tenants, requests and waits."""

from __future__ import annotations

from typing import Annotated, Literal

from mobula.configs.schema.base import Field, PositiveInt, Section

MAX_POLL_S = 40.0  # below the timeout of the client
Seconds = Annotated[float, Field(gt=0, le=24 * 3600)]


class TrainingServiceConfig(Section):
    """The training service (`mobula serve-training`)."""

    weights: Literal["adapters", "full"] = "adapters"
    """What clients train. `adapters`: LoRA adapters of many models on one frozen base. `full`: all weights of one model
    at a time, for one tenant, sharded over the learner ranks; the client's rank is not used."""
    max_models: PositiveInt = 8
    """Models of one tenant that are active at once; 1 with `weights=full`. A model is active while its session sends
    heartbeats."""
    max_rows: PositiveInt = 1024
    """Rows of one `forward` or `forward_backward` request; the client splits larger ones."""
    max_tokens: PositiveInt = 262_144
    """Tokens of all rows of one request."""
    max_batch_tokens: PositiveInt = 65_536
    """Tokens of one call of the learner, which may hold requests of several models; one larger request runs alone."""
    max_queued: PositiveInt = 256
    """Requests of one model that are not finished. Further requests are answered with 429, and the client waits."""
    max_samples: PositiveInt = 4096
    """Sequences of one tenant that are not finished. Further requests are answered with 429, and the client waits."""
    max_dense_values: PositiveInt = 67_108_864
    """Rows times columns of a tensor that a client sends in sparse form."""
    max_request_bytes: PositiveInt = 67_108_864
    """Bytes of one request, after decompression."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of new adapters: the product of the factors is multiplied by alpha / rank. The protocol has no field for
    it."""
    kept_results: PositiveInt = 256
    """Newest results of a model that stay on disk after a snapshot. A client that asks for one that was removed gets an
    error."""
    kept_results_s: Seconds = 600.0
    """Seconds that each result stays on disk at least. A client that lost its connection reads its results later, and
    until then any number of its other requests may finish."""
    kept_in_memory: PositiveInt = 4096
    """Newest results of all models and samplers that are answered without reading the disk."""
    snapshot_steps: PositiveInt = 8
    """Optimizer steps of a model between two snapshots. After a failure the requests since the snapshot run again."""
    recovery_s: Seconds = 600.0
    """Seconds that the learner may be unavailable before the requests that wait for it fail."""
    poll_s: Annotated[float, Field(gt=0, le=MAX_POLL_S)] = 30.0
    """Seconds until a client's question for a result is answered although it is not finished. The client's own timeout
    is 45 s."""
    session_idle_s: Seconds = 600.0
    """Seconds without a heartbeat after which the models of a session leave the learner. The next request restores
    them."""
