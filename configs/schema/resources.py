"""Resource presets: how many workers each role has and what each one takes."""

from __future__ import annotations

from typing import Annotated, Literal

from mobula.configs.schema.base import Field, NonNegativeInt, PositiveFloat, PositiveInt, Section

REWARD_SERVICE = "reward."
"""Opens the name of the role that a service of `reward_services` is."""

NonNegativeFloat = Annotated[float, Field(ge=0)]


class WorkerResources(Section):
    """One role's workers. CPU shares are what Ray books; threads are what a process really runs."""

    num_workers: Annotated[int, Field(ge=0)] = 1
    """Processes of this role."""
    num_cpus: PositiveFloat = 1.0
    """CPUs that Ray books for one worker; roles that take turns book shares of one."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray books for one worker: a share of one, or a whole number."""
    num_threads: PositiveInt = 1
    """Threads of one worker process (OMP, torch)."""
    bind_cores: bool = False
    """Bind worker i to cores of its own: `num_threads` from `first_core` + i * `num_threads` on, modulo the node's."""
    first_core: NonNegativeInt = 0
    """First core of the role's first worker on its node; roles that work at the same time need different cores."""
    custom_resources: dict[str, PositiveFloat] = {}
    """Further resources that Ray books for one worker, as the nodes were started with (`--resources`)."""
    node_labels: dict[str, str] = {}
    """Labels that a node must have to get workers of this role (`ray start --labels`)."""
    strategy: Literal["auto", "pack", "spread"] = "auto"
    """`pack`: on as few nodes as possible; `spread`: on as many; `auto`: learner ranks are packed, the others go where
    most CPUs are free."""


class RolloutResources(WorkerResources):
    """The rollout actors' workers, each of which is one engine."""

    tensor_parallel: PositiveInt = 1
    """GPUs that one engine's model is split over, all on one node; `num_gpus` must be the same number."""


class LearnerResources(WorkerResources):
    """The learner ranks."""

    replicas: PositiveInt = 1
    """Groups of ranks that each hold a whole model; a group shards it over its own ranks, so that blocks are gathered
    within a node and gradients alone are summed between nodes. Set it to the number of nodes; needs
    `learner.backend=fsdp2`."""


class ResourcesConfig(Section):
    """A resource preset: workers of each role, and the cluster that they run in."""

    preset: str
    """The preset's name."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device type of engines, learner and reference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engines, learner and reference."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Weight transport from learner to engines."""
    colocated: bool = False
    """Engines and learner take turns on the same devices: engines sleep while the learner trains, and the learner is in
    host memory while they sample. On CPU the turns are taken and nothing moves."""
    sleep_level: Annotated[int, Field(ge=1, le=2)] = 1
    """What a sleeping vLLM engine keeps in host memory: 1 its weights, 2 only its buffers, since the next push brings
    all weights. A push of adapters needs 1."""
    rollout: RolloutResources = RolloutResources()
    """The rollout actors, one engine each."""
    learner: LearnerResources = LearnerResources()
    """The learner ranks; they are placed together."""
    critic: WorkerResources = WorkerResources()
    """The ranks of a critic with `algorithm.critic.place=own_ranks`, unused otherwise; they are placed together."""
    reference: WorkerResources = WorkerResources()
    """The scorers of the frozen policy; unused when `algorithm.kl.coef` and `algorithm.distillation.coef` are 0."""
    reward: WorkerResources = WorkerResources()
    """The reward workers of all components that name no service of their own."""
    processor: WorkerResources = WorkerResources(num_workers=0)
    """The processor workers, which read, decode and process images and videos. Without any the driver does it, one
    prompt after the other."""
    reward_services: dict[str, WorkerResources] = {}
    """Workers of their own for components that name the key as their `service`: a reward model on a share of a GPU."""
    object_store_bytes: Annotated[int, Field(ge=75 * 2**20)] = 2048 * 2**20
    """Size of the object store of a cluster that this run starts itself; Ray starts none below 75 MiB."""
    num_cpus: Annotated[int, Field(ge=0)] = 0
    """CPUs of a cluster that this run starts itself; 0 takes what the machine has."""
    num_nodes: PositiveInt = 1
    """Nodes that `resources=multi_node` and `multi_node_large` are made for: for each they have four learner ranks, and
    four engines or one over four GPUs. The workers of other presets are not counted by nodes."""
    address: str = ""
    """The Ray cluster to join: HOST:PORT of its control store, or `auto` for the cluster on this machine. Empty joins
    the cluster of RAY_ADDRESS; where that is not set a private cluster is started."""
    dashboard: bool = True
    """Whether a cluster that this run starts itself serves the Ray dashboard, on the loopback address."""

    @property
    def roles(self) -> dict[str, WorkerResources]:
        """Every role's workers by the role's name, the ones that are placed first first."""
        return {
            "learner": self.learner,
            "critic": self.critic,
            "rollout": self.rollout,
            "reference": self.reference,
            "processor": self.processor,
            "reward": self.reward,
            **{f"{REWARD_SERVICE}{name}": workers for name, workers in self.reward_services.items()},
        }
