"""RehearsalStage: everything that a rehearsal needs of a configuration, and the same at other sizes and speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import NodeResources, needed_roles, plan_placement
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.fit import MemoryPlan, plan_memory
from mobula.deploy.rehearsal.driver_load import DriverLoad, driver_load
from mobula.deploy.rehearsal.play import Played, play
from mobula.deploy.rehearsal.recording import mean_phases, staleness_shares, warm
from mobula.deploy.rehearsal.roles import Hardware
from mobula.deploy.rehearsal.simulated.cores import Cores
from mobula.deploy.rehearsal.simulated.faults import PlannedFault
from mobula.deploy.rehearsal.simulated.lengths import ResponseLengths
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.deploy.wiring.preparation import Prepared
from mobula.learner.policies.shapes import ModelShape

FEW_STEPS = 5  # of a rehearsal at another size or speed
DEFAULT_SLOTS = 16  # responses at a time of an engine that is not planned
FASTER: Mapping[str, tuple[str, ...]] = {  # role -> its speeds
    "rollout": ("decode_step_s", "decode_sequence_s", "prefill_tokens_per_s", "engine_response_s"),
    "learner": ("learner_tokens_per_s", "learner_response_s", "update_s", "exchange_s"),
    "reference": ("reference_tokens_per_s", "reference_response_s", "reference_s"),
    "reward": ("reward_s",),
    "network": ("push_s", "push_bytes_per_s", "settle_s"),
}


@dataclass(frozen=True)
class RehearsalStage:
    """A configuration with its data, hardware and speeds."""

    prepared: Prepared
    shape: ModelShape
    nodes: tuple[PlannedNode, ...]
    speeds: Speeds
    lengths: ResponseLengths

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    def memory(self) -> MemoryPlan:
        """The memory of every worker, GPU and node.

        Raises:
            PlacementError: CPUs or GPUs do not suffice.
        """
        return plan_memory(self.config, self.shape, self.nodes)

    def hardware(self) -> Hardware:
        """The placement of the roles. Raises: PlacementError: CPUs or GPUs do not suffice."""
        nodes = [node.resources for node in self.nodes]
        placement = plan_placement(self.config.resources, nodes, needed_roles(self.config))
        return Hardware(
            placement=placement,
            nodes=nodes,
            speeds=self.speeds,
            cores=self._cores(),
            num_slots=self._slots(),
            manifest=self.shape.manifest,
            driver_node=nodes[0].node_id,
        )

    def play(
        self, num_steps: int | None = None, faults: Sequence[PlannedFault] = (), max_wall_s: float = math.inf
    ) -> Played:
        """Plays the run, or its first `num_steps`, for at most `max_wall_s` on this machine."""
        changes = {} if num_steps is None else {"num_steps": num_steps}
        prepared = replace(self.prepared, config=self.config.model_copy(update=changes))
        return play(prepared, self.hardware(), self.lengths, faults, max_wall_s)

    def faster(self, role: str, factor: float) -> RehearsalStage:
        """The same with the workers of a role `factor` times as fast, as if there were so many more of them."""
        changes = {}
        for name in FASTER[role]:
            value = getattr(self.speeds, name)
            changes[name] = value * factor if name.endswith("_per_s") else value / factor
        return replace(self, speeds=replace(self.speeds, **changes))

    def larger(self, factor: int) -> RehearsalStage:
        """The same with `factor` times the nodes, workers and prompts."""
        config, resources = self.config, self.config.resources
        roles = {
            name: workers.model_copy(update={"num_workers": workers.num_workers * factor})
            for name, workers in resources.roles.items()
            if name in type(resources).model_fields
        }
        algorithm = config.algorithm
        groups = {
            "prompts_per_step": algorithm.prompts_per_step * factor,
            "max_concurrent_groups": algorithm.max_concurrent_groups * factor,
        }
        services = {
            name: workers.model_copy(update={"num_workers": workers.num_workers * factor})
            for name, workers in resources.reward_services.items()
        }
        changes: dict[str, Any] = {
            "resources": resources.model_copy(update={**roles, "reward_services": services}),
            "algorithm": algorithm.model_copy(update=groups),
        }
        prepared = replace(self.prepared, config=config.model_copy(update=changes))
        return replace(self, prepared=prepared, nodes=_repeated(self.nodes, factor))

    def _cores(self) -> Cores:
        """On CPU all workers of a node share its cores; a GPU is a worker's own."""
        resources = self.config.resources
        if resources.device == "cuda":
            return Cores()
        return Cores(sum(node.resources.num_cpus for node in self.nodes))

    def _slots(self) -> int:
        config = self.config
        if config.resources.device == "cpu":
            return config.sampler.vllm.max_num_seqs or DEFAULT_SLOTS
        engine = self.memory().engine
        return DEFAULT_SLOTS if engine is None else engine.num_seqs


@dataclass(frozen=True)
class Result:
    """The means of a rehearsal, without its first and last steps."""

    step_s: float
    phases: Mapping[str, float]
    utilisation: Mapping[str, float]
    staleness: Mapping[int, float]
    driver: DriverLoad
    store_share: float  # of the fullest object store
    store_node: str
    tokens_per_s: float

    @property
    def wait_share(self) -> float:
        """Share of a step in which the learner waits for rollouts."""
        return self.phases["wait_for_rollouts"] / self.step_s


def result_of(stage: RehearsalStage, played: Played) -> Result:
    steps = warm(played.steps)
    roles = dict.fromkeys(role for step in steps for role in step.utilisation)
    capacity = stage.config.resources.object_store_bytes
    node, peak = max(played.store_peak.items(), key=lambda item: item[1], default=("", 0))
    phases = mean_phases(steps)
    tokens = sum(sum(step.staleness.values()) for step in steps)
    return Result(
        step_s=phases["total"],
        phases={name: seconds for name, seconds in phases.items() if name != "total"},
        utilisation={role: fmean(step.utilisation.get(role, 0.0) for step in steps) for role in roles},
        staleness=staleness_shares(steps),
        driver=driver_load(stage.config, steps),
        store_share=peak / capacity,
        store_node=node,
        tokens_per_s=tokens / sum(step.seconds["total"] for step in steps),
    )


def quantiles(lengths: ResponseLengths, num_prompts: int = 500) -> dict[str, float]:
    """Mean, median and 99th percentile of response lengths."""
    tokens = np.concatenate([lengths.of(f"quantiles/{index}", 8) for index in range(num_prompts)])
    return {"mean": float(tokens.mean()), "p50": float(np.median(tokens)), "p99": float(np.quantile(tokens, 0.99))}


def fits(stage: RehearsalStage) -> str:
    """Why the placement does not fit its nodes; empty if it does."""
    try:
        stage.hardware()
    except PlacementError as error:
        return str(error)
    return ""


def _repeated(nodes: tuple[PlannedNode, ...], factor: int) -> tuple[PlannedNode, ...]:
    def renamed(node: PlannedNode, copy: int) -> NodeResources:
        return replace(node.resources, node_id=f"{node.node_id}.{copy}") if copy else node.resources

    return tuple(replace(node, resources=renamed(node, copy)) for copy in range(factor) for node in nodes)
