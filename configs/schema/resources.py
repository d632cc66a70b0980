"""Keys of resources and of the training service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from mobula.configs.schema.base import Section

REWARD_SERVICE = "reward."
"""Prefix of the role name of a service in `reward_services`."""


NonNegativeFloat = Annotated[float, Field(ge=0)]


class WorkerResources(Section):
    """One role's workers. Ray reserves CPU shares; the number of threads of a process is independent of them."""

    num_workers: Annotated[int, Field(ge=0)] = 1
    """Processes of this role."""
    num_cpus: PositiveFloat = 1.0
    """CPUs that Ray reserves for one worker; roles in alternating time slices can share a CPU."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for one worker: a fraction below 1, or a whole number."""
    num_threads: PositiveInt = 1
    """Threads of one worker process (OMP, torch)."""
    bind_cores: bool = False
    """Pin worker i to `num_threads` cores from `first_core` + i * `num_threads` on, modulo the cores of the node."""
    first_core: NonNegativeInt = 0
    """First core of the role's first worker on a node; roles that run concurrently need different cores."""
    custom_resources: dict[str, PositiveFloat] = {}
    """Custom resources that Ray reserves for one worker (`ray start --resources` on the nodes)."""
    node_labels: dict[str, str] = {}
    """Labels that a node needs for workers of this role (`ray start --labels`)."""
    strategy: Literal["auto", "pack", "spread"] = "auto"
    """`pack`: as few nodes as possible; `spread`: as many as possible; `auto`: learner ranks are packed, other workers
    use the nodes with most free CPUs."""


class RolloutResources(WorkerResources):
    """The workers of rollout actors, one engine each."""

    tensor_parallel: PositiveInt = 1
    """GPUs of one engine (tensor parallelism within a node); must equal `num_gpus`."""


class LearnerResources(WorkerResources):
    """The learner ranks."""

    replicas: PositiveInt = 1
    """Replicas of the model (HSDP): ranks shard the model within a replica, so that parameters are gathered within a
    node and only gradients are summed between nodes. Set it to the number of nodes; needs `learner.backend=fsdp2`."""


class ResourcesConfig(Section):
    """A resource preset: workers of each role, and the cluster."""

    preset: str
    """The preset's name."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device type of engines, learner and reference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engines, learner and reference."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Weight transport from learner to engines."""
    colocated: bool = False
    """Engines and learner share devices in alternating time slices: engines sleep while the learner trains, and the
    learner is offloaded to host memory while engines sample. On CPU roles alternate without offload."""
    sleep_level: Annotated[int, Field(ge=1, le=2)] = 1
    """Content of host memory while a vLLM engine sleeps: 1 for weights, 2 for buffers only, because the next push sends
    all weights. A push of adapters needs 1."""
    rollout: RolloutResources = RolloutResources()
    """The rollout actors, one engine each."""
    learner: LearnerResources = LearnerResources()
    """The learner ranks; placed together."""
    critic: WorkerResources = WorkerResources()
    """The ranks of a critic with `algorithm.critic.place=own_ranks`, unused otherwise; placed together."""
    reference: WorkerResources = WorkerResources()
    """The scorers of the frozen policy; unused when `algorithm.kl.coef` and `algorithm.distillation.coef` are 0."""
    reward: WorkerResources = WorkerResources()
    """The reward workers of all components without a separate service."""
    processor: WorkerResources = WorkerResources(num_workers=0)
    """The processor workers, which read, decode and process media. Without workers the driver prepares one prompt at a
    time."""
    reward_services: dict[str, WorkerResources] = {}
    """Name -> workers of a separate reward service, which components select by `service`; e.g. a reward model on a
    share of a GPU."""
    object_store_bytes: Annotated[int, Field(ge=75 * 2**20)] = 2048 * 2**20
    """Size of the object store of a private cluster; Ray needs at least 75 MiB."""
    num_cpus: Annotated[int, Field(ge=0)] = 0
    """CPUs of a private cluster; 0 for all CPUs of the machine."""
    num_nodes: PositiveInt = 1
    """Number of nodes for `resources=multi_node` and `multi_node_large`: per node, four learner ranks, and four engines
    or one engine over four GPUs. Other presets do not read it."""
    address: str = ""
    """The Ray cluster to join: HOST:PORT of the control store, or `auto` for the cluster on this machine. Empty joins
    the cluster of RAY_ADDRESS, or starts a private cluster if this is not set."""
    dashboard: bool = True
    """Whether a private cluster serves the Ray dashboard, on the loopback address."""

    @property
    def roles(self) -> dict[str, WorkerResources]:
        """Role -> workers, in the order of placement."""
        return {
            "learner": self.learner,
            "critic": self.critic,
            "rollout": self.rollout,
            "reference": self.reference,
            "processor": self.processor,
            "reward": self.reward,
            **{f"{REWARD_SERVICE}{name}": workers for name, workers in self.reward_services.items()},
        }


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
