"""Stage of a rehearsal: its prompts and roles, and the largest size that still works."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mobula.actors.datasets.open_split import TRAIN
from mobula.actors.datasets.prompts import PreflightReport
from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaHandle, MediaSpan, MediaStore
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup
from mobula.cluster.runtime.placement import NodeResources, needed_roles, plan_placement
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.plan_command import MemoryPlan, plan_memory
from mobula.deploy.rehearsal.play import DriverLoad, Played, driver_load, mean_phases, play, staleness_shares, warm
from mobula.deploy.rehearsal.roles import Hardware, with_role
from mobula.deploy.rehearsal.simulated.engine import summary_of
from mobula.deploy.rehearsal.simulated.machine import Cores, LognormalLengths, PlannedFault, ResponseLengths
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.deploy.wiring.preparation import VALIDATION, Prepared, prepare
from mobula.learner.policies.shapes import ModelShape
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.shares import StepGroups, planned_shares

NUM_STATED_ROWS = 4096


@dataclass(frozen=True)
class StatedProcessor:
    """Implements `Processor`: every prompt has the stated length, with one image of so many tokens and bytes."""

    num_tokens: int
    media_tokens: int = 0
    media_bytes: int = 0
    media_token_ids: tuple[int, ...] = ()
    template_token_ids: tuple[int, ...] = ()
    takes_images: bool = True
    num_ahead: int = 1

    def begin(self, row: Row, prompt_id: str) -> Future[Prompt]:
        begun: Future[Prompt] = Future()
        begun.set_result(self.prepare(row, prompt_id))
        return begun

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        ids = np.zeros(self.num_tokens, dtype=np.int32)
        media = (MediaHandle(row.sample_id, "image", self.media_bytes, None),) if self.media_tokens else ()
        spans = (MediaSpan(0, self.media_tokens),) if self.media_tokens else ()
        return Prompt(prompt_id, row.sample_id, "", ids, ids, media, spans, row.references, row.metadata)

    def check(self, row: Row) -> int:
        return self.num_tokens

    def num_media(self, row: Row) -> int:
        return int(self.media_tokens > 0)


def stated_run(config: RunConfig, shape: ModelShape, processor: Any) -> Prepared:
    rows = tuple(Row(str(index), "", "", "") for index in range(NUM_STATED_ROWS))
    report = PreflightReport(rows, (), processor.num_tokens)
    names = {TRAIN, VALIDATION, config.evaluation.split, *(s.split for s in config.evaluation.suites.values())}
    store = MediaStore(lambda media: None, config.data.media_cache_bytes)
    return Prepared(config, Path(config.policy.model), shape.manifest, processor, store, dict.fromkeys(names, report))


def prepared_run(config: RunConfig, shape: ModelShape) -> Prepared:
    """The checked parts of a run with its own data, processed as a run does; `config.policy.model` is a folder of a
    shrunk model, and the manifest is that of the real one."""
    prepared = prepare(config, lambda media: None)
    if not isinstance(prepared, Prepared):
        raise PreflightError("a rehearsal needs a run that samples responses: offline jobs have no rollouts")
    return replace(prepared, checkpoint=shape.manifest)


def shrunk(config: RunConfig, model_type: str, folder: Path) -> RunConfig:
    """The configuration with a tiny model of the family of `model_type`, which is written to `folder`."""
    if config.policy.tiny in TINY and not (Path(config.policy.model) / "config.json").is_file():
        name = config.policy.tiny
    elif (name := next((tiny for tiny in TINY if tiny.replace("-", "_").replace(".", "_") == model_type), "")) == "":
        raise PreflightError(
            f"no shrunk model stands for the model type {model_type}: set policy.tiny to one of {', '.join(TINY)}"
        )
    write_tiny(name, folder, tie_word_embeddings=config.policy.tiny_tied_embeddings)
    policy = config.policy.model_copy(update={"model": str(folder), "tiny": "none"})
    return config.model_copy(update={"policy": policy})


FEW_STEPS = 5  # of a rehearsal at another size or speed
SIGMA = 0.8  # spread of the logarithm of lengths, as of `mobula rehearse`
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
    prepared: Prepared
    shape: ModelShape
    nodes: tuple[PlannedNode, ...]
    speeds: Speeds
    lengths: ResponseLengths

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    def memory(self) -> MemoryPlan:
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
        config, resources, algorithm = self.config, self.config.resources, self.config.algorithm
        for name, workers in resources.roles.items():
            more = workers.model_copy(update={"num_workers": workers.num_workers * factor})
            resources = with_role(resources, name, more)
        groups = {
            "prompts_per_step": algorithm.prompts_per_step * factor,
            "max_concurrent_groups": algorithm.max_concurrent_groups * factor,
        }
        changes = {"resources": resources, "algorithm": algorithm.model_copy(update=groups)}
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


def step_time(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], speeds: Speeds) -> float:
    """The seconds of a step with prompts and responses of half the longest length, without the run's data; `config` is
    of a shrunk model."""
    data = config.data.model_copy(update={"path": Path()})
    stated = StatedProcessor(config.data.max_prompt_tokens // 2)
    limit = config.sampler.max_tokens
    lengths = LognormalLengths(limit / 2 / math.exp(SIGMA**2 / 2), SIGMA, limit, config.seed)
    prepared = stated_run(config.model_copy(update={"data": data}), shape, stated)
    stage = RehearsalStage(prepared, shape, tuple(nodes), speeds, lengths)
    played = stage.play(num_steps=FEW_STEPS)
    if not played.steps:
        raise PreflightError(f"the rehearsal ended before its first step: {played.error}")
    return result_of(stage, played).step_s


def quantiles(lengths: ResponseLengths, num_prompts: int = 500) -> dict[str, float]:
    tokens = np.concatenate([lengths.of(f"quantiles/{index}", 8) for index in range(num_prompts)])
    return {"mean": float(tokens.mean()), "p50": float(np.median(tokens)), "p99": float(np.quantile(tokens, 0.99))}


def _repeated(nodes: tuple[PlannedNode, ...], factor: int) -> tuple[PlannedNode, ...]:
    def renamed(node: PlannedNode, copy: int) -> NodeResources:
        return replace(node.resources, node_id=f"{node.node_id}.{copy}") if copy else node.resources

    return tuple(replace(node, resources=renamed(node, copy)) for copy in range(factor) for node in nodes)


SPEED_UP = 2.0
MAX_DRIVER_SHARE = 1.0
MAX_PLANNING_SHARE = 0.1  # of a step, in which every rank computes which groups to fetch
MIN_EFFICIENCY = 0.8  # tokens/s a worker, over those of the smallest size


@dataclass(frozen=True)
class Gain:
    role: str
    step_s: float
    gain: float  # steps per hour, over those of the configuration


@dataclass(frozen=True)
class Size:
    factor: int
    num_steps: int  # that were played
    num_engines: int
    num_ranks: int
    result: Result
    planning_s: float  # CPU seconds of each rank for the shares of one step, measured
    wall_s: float
    broken: tuple[str, ...]  # limits that it exceeds


def gains(stage: RehearsalStage, base: Result) -> list[Gain]:
    """Plays the run with each role at twice its speed, the largest gain first."""
    roles = [role for role in FASTER if role == "network" or base.utilisation.get(role, 0.0) > 0.01]
    found = []
    for role in roles:
        faster = stage.faster(role, SPEED_UP)
        result = result_of(faster, faster.play(num_steps=stage.config.num_steps))
        found.append(Gain(role, result.step_s, base.step_s / result.step_s - 1))
    return sorted(found, key=lambda gain: -gain.gain)


@dataclass(frozen=True)
class Sweep:
    sizes: tuple[Size, ...] = ()
    ended: str = ""  # why larger sizes were not played


def swept(stage: RehearsalStage, factors: Sequence[int], max_wall_s: float) -> Sweep:
    """Plays the run at each size, the smallest first, each for at most `max_wall_s` on this machine. A size without a
    finished step ends the sweep."""
    found: list[Size] = []
    for factor in sorted(factors):
        started = time.perf_counter()
        larger = stage.larger(factor)
        played = larger.play(num_steps=FEW_STEPS, max_wall_s=max_wall_s)
        if not played.steps:
            reason = played.error or "no step"
            return Sweep(tuple(found), f"x{factor} and larger sizes are unknown: {reason}; raise --size-seconds")
        result = result_of(larger, played)
        planning_s = planning_seconds(larger)
        resources = larger.config.resources
        size = Size(
            factor=factor,
            num_steps=len(played.steps),
            num_engines=resources.rollout.num_workers,
            num_ranks=resources.learner.num_workers,
            result=result,
            planning_s=planning_s,
            wall_s=time.perf_counter() - started,
            broken=_broken(result, planning_s, factor, found[0] if found else None),
        )
        found.append(size)
    return Sweep(tuple(found))


def planning_seconds(stage: RehearsalStage) -> float:
    """CPU seconds in which one learner rank computes the shares of all ranks, twice as in each step."""
    config = stage.config
    source = stage.prepared.source()
    prompts = [source.next() for _ in range(min(32, config.algorithm.prompts_per_step))]
    groups = [_group(stage, prompts[n % len(prompts)], n) for n in range(config.algorithm.prompts_per_step)]
    started = time.thread_time()
    entries = StepGroups(groups, 1, config)
    for _ in range(2):
        planned_shares(entries, config.resources.learner.num_workers)
    return time.thread_time() - started


def _group(stage: RehearsalStage, prompt: Prompt, number: int) -> ScoredGroup:
    num_siblings = stage.config.algorithm.samples_per_prompt
    lengths = stage.lengths.of(f"planning/{number}", num_siblings).tolist()
    summary = summary_of(prompt, {0: sum(lengths)}, lengths, stage.config.sampler.max_tokens)
    return ScoredGroup(summary, None, (Reward(0.0),) * num_siblings)


def _broken(result: Result, planning_s: float, factor: int, smallest: Size | None) -> tuple[str, ...]:
    broken = []
    if result.driver.share > MAX_DRIVER_SHARE:
        broken.append(f"driver: {result.driver.measured_s + result.driver.ray_s:.1f} CPU s a step")
    if result.store_share > 1:
        broken.append(f"object store of {result.store_node}: {result.store_share:.1f} times its capacity")
    if planning_s > MAX_PLANNING_SHARE * result.step_s:
        broken.append(f"learner: {planning_s:.1f} s a step for the shares of ranks")
    if smallest is not None:
        each = result.tokens_per_s / factor, smallest.result.tokens_per_s / smallest.factor
        if each[0] < MIN_EFFICIENCY * each[1]:
            broken.append(f"efficiency: {each[0] / each[1]:.0%} of the smallest size")
    return tuple(broken)
