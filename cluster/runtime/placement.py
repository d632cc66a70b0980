"""Plans a resource preset on a cluster: node, CPUs, GPUs and cores of each worker.

The plan is computed before any process starts, so a preset that does not fit is refused at once. A placement group
that does not fit would wait forever without an error.

    nodes = [NodeResources("a", num_cpus=2, num_gpus=0)]
    plan = plan_placement(config.resources, nodes, roles=needed_roles(config))
    [worker.name for worker in plan.workers]   # learner/0, learner/1, rollout/0, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from mobula.cluster.errors import PlacementError
from mobula.configs.schema import ResourcesConfig, RunConfig, WorkerResources
from mobula.configs.schema.rewards import SHARED_SERVICE

TOGETHER = ("learner", "critic")  # roles whose workers form one process group and share one placement group
EPSILON = 1e-6  # tolerance of sums of decimal fractions; Ray counts in steps of 1e-4


@dataclass(frozen=True)
class NodeResources:
    """Free resources of one node, in Ray's units. `all_cpus` counts the CPUs of the node, reserved or not (None: all
    are free), so that workers are bound to the same cores on a busy node. `name` is shown to users: `HOSTNAME (IP)`."""

    node_id: str
    num_cpus: float
    num_gpus: float
    all_cpus: float | None = None
    name: str = ""
    custom: tuple[tuple[str, float], ...] = ()  # custom resources of Ray: name, amount
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        return self.name or self.node_id

    @property
    def num_cores(self) -> int:
        return int((self.num_cpus if self.all_cpus is None else self.all_cpus) + EPSILON)


@dataclass(frozen=True)
class PlacedWorker:
    """One worker of a role with its planned resources.

    `cores` are indices into the list of usable cores of the node; empty means not bound. `gpus` are the planned GPUs of
    the node by index; Ray selects them by the same rule (the fullest GPU that holds the share).
    """

    role: str
    index: int
    node_id: str
    num_cpus: float
    num_gpus: float
    num_threads: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    node_name: str = ""
    custom: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


@dataclass(frozen=True)
class PlacementPlan:
    """All workers of a run, by role and index."""

    workers: tuple[PlacedWorker, ...]

    def of_role(self, role: str) -> tuple[PlacedWorker, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(frozen=True)
class PlanRow:
    """A row of the table for users: one role on one node."""

    role: str
    node: str  # name of the node
    num_workers: int
    num_cpus: float  # of all these workers
    num_gpus: float  # of all these workers
    num_threads: int  # of one worker
    cores: tuple[tuple[int, ...], ...]  # one entry per worker


def needed_roles(config: RunConfig) -> tuple[str, ...]:
    """Returns the roles that this run starts.

    There is no reference without a KL term or a teacher, no critic without separate ranks, and no reward worker
    without a component. An offline job has learner, reference and processor workers only, the training service (engines
    that serve adapters) learner ranks and engines.
    """
    if config.sampler.adapters.are_on:
        return ("learner", "rollout")
    idle = set() if config.needs_reference else {"reference"}
    idle |= set() if config.algorithm.critic.has_own_ranks else {"critic"}
    idle |= set() if config.resources.processor.num_workers else {"processor"}
    if config.offline.is_on:
        return tuple(role for role in ("learner", "reference", "processor") if role not in idle)
    idle |= set() if SHARED_SERVICE in config.rewards.services else {SHARED_SERVICE}
    return tuple(role for role in config.resources.roles if role not in idle)


def inference_roles(config: RunConfig) -> tuple[str, ...]:
    """Returns the needed roles that prepare, sample and score prompts: the roles of an evaluation."""
    needed = ("processor", "rollout", SHARED_SERVICE)
    return tuple(role for role in needed_roles(config) if role.partition(".")[0] in needed)


def training_roles(config: RunConfig) -> tuple[str, ...]:
    """Returns the needed roles that train: the roles of a replay."""
    return tuple(role for role in needed_roles(config) if role in TOGETHER)


def plan_placement(resources: ResourcesConfig, nodes: Sequence[NodeResources], roles: Sequence[str]) -> PlacementPlan:
    """Assigns every worker of `roles` to a node with the role's labels. Learner ranks come first; `strategy` selects
    whether a role is packed or spread."""
    spaces = [_Space(node) for node in nodes]
    asked = {role: resources.roles[role] for role in resources.roles if role in roles}
    sizes = {role: (-workers.num_gpus, -workers.num_cpus) for role, workers in asked.items()}
    most_demanding = sorted(asked, key=lambda role: (role not in TOGETHER, *sizes[role]))
    placed = {role: _place_role(role, asked[role], spaces, resources.preset) for role in most_demanding}
    return PlacementPlan(tuple(worker for role in asked for worker in placed[role]))


def check_room(resources: ResourcesConfig, role: str, num_more: int, nodes: Sequence[NodeResources]) -> None:
    """Checks that `num_more` workers of a role fit into the free resources."""
    workers = resources.roles[role].model_copy(update={"num_workers": num_more})
    spaces = [_Space(node) for node in nodes]
    room = min(num_more, sum(space.capacity(workers) for space in spaces))
    if room < num_more:
        free = "; ".join(space.describe() for space in spaces) or "there is no node"
        raise PlacementError(
            f"{num_more} more {role} workers with {workers.num_cpus:g} CPUs and {workers.num_gpus:g} GPUs each do not "
            f"fit, {room} would: {free}"
        )


def place_at(resources: ResourcesConfig, role: str, index: int, node: NodeResources, seat: int) -> PlacedWorker:
    """Returns a worker that joins later, `seat`-th of its role on `node`; `node` has all resources of the node."""
    return _placed(role, index, resources.roles[role], node, seat)


def plan_table(plan: PlacementPlan) -> list[PlanRow]:
    """Returns the plan as rows, one per role and node."""
    together: dict[tuple[str, str], list[PlacedWorker]] = {}
    for worker in plan.workers:
        together.setdefault((worker.role, worker.node_id), []).append(worker)
    return [
        PlanRow(
            role=role,
            node=workers[0].node_name or node_id,
            num_workers=len(workers),
            num_cpus=sum(worker.num_cpus for worker in workers),
            num_gpus=sum(worker.num_gpus for worker in workers),
            num_threads=workers[0].num_threads,
            cores=tuple(worker.cores for worker in workers),
        )
        for (role, node_id), workers in together.items()
    ]


class _Space:
    """Free resources of one node. Each GPU is counted separately, because a share must fit on one GPU."""

    def __init__(self, node: NodeResources) -> None:
        self.node = node
        self.free_cpus = node.num_cpus
        self.free_gpus = [1.0] * int(node.num_gpus + EPSILON)
        self.free_custom = dict(node.custom)

    def fits(self, workers: WorkerResources) -> bool:
        return (
            self.is_labelled(workers)
            and self.free_cpus + EPSILON >= workers.num_cpus
            and self._gpus_for(workers.num_gpus) is not None
            and all(self.free_custom.get(n, 0.0) + EPSILON >= w for n, w in workers.custom_resources.items())
        )

    def is_labelled(self, workers: WorkerResources) -> bool:
        return set(workers.node_labels.items()) <= set(self.node.labels)

    def take(self, workers: WorkerResources) -> tuple[int, ...]:
        """Takes the resources of one worker and returns its GPUs."""
        gpus = self._gpus_for(workers.num_gpus)
        assert gpus is not None, f"{self.node.shown} was asked for GPUs that it does not have"
        self.free_cpus -= workers.num_cpus
        for gpu in gpus:
            self.free_gpus[gpu] -= min(1.0, workers.num_gpus)
        for name, wanted in workers.custom_resources.items():
            self.free_custom[name] -= wanted
        return tuple(gpus)

    def capacity(self, workers: WorkerResources) -> int:
        trial, count = copy(self), 0
        trial.free_gpus, trial.free_custom = list(self.free_gpus), dict(self.free_custom)
        while count < workers.num_workers and trial.fits(workers):
            trial.take(workers)
            count += 1
        return count

    def describe(self) -> str:
        custom = "".join(f", {free:g} {name}" for name, free in self.free_custom.items())
        whole = sum(free + EPSILON >= 1 for free in self.free_gpus)
        shares = f" ({whole} of them whole)" if whole + EPSILON < sum(self.free_gpus) else ""
        return f"{self.node.shown} has {self.free_cpus:g} CPUs and {sum(self.free_gpus):g} GPUs{shares}{custom} free"

    def _gpus_for(self, num_gpus: float) -> list[int] | None:
        """Returns the GPUs to take: the fullest that holds the share, or enough empty GPUs; None: too few."""
        share = min(1.0, num_gpus)
        holding = [gpu for gpu, free in enumerate(self.free_gpus) if free + EPSILON >= share]
        holding.sort(key=lambda gpu: round(self.free_gpus[gpu], 4))
        count = 0 if num_gpus == 0 else max(1, round(num_gpus))
        return holding[:count] if len(holding) >= count else None


def _place_role(role: str, workers: WorkerResources, spaces: Sequence[_Space], preset: str) -> list[PlacedWorker]:
    packed = workers.strategy == "pack" or (workers.strategy == "auto" and role in TOGETHER)
    num_chosen: Counter[str] = Counter()  # node -> workers of this role
    placed: list[PlacedWorker] = []
    fitting = [space for space in spaces if space.fits(workers)]
    for index in range(workers.num_workers):
        if not fitting:
            raise PlacementError(_refusal(role, index, workers, spaces, preset))
        if packed and not num_chosen:
            space = max(fitting, key=lambda space: space.capacity(workers))  # the roomiest
        else:
            space = _preferred(fitting, workers, num_chosen, packed)
        gpus, seat = space.take(workers), num_chosen[space.node.node_id]
        placed.append(replace(_placed(role, index, workers, space.node, seat), gpus=gpus))
        num_chosen[space.node.node_id] += 1
        if not space.fits(workers):  # resources of the other nodes have not changed
            fitting.remove(space)
    return placed


def _preferred(
    fitting: Sequence[_Space], workers: WorkerResources, num_chosen: Mapping[str, int], packed: bool
) -> _Space:
    """Returns the preferred node: for a packed role a node that it already uses, for a spread role the node with the
    fewest of its workers; then a node without GPUs for a worker without GPU; then the node with most free CPUs."""
    return max(
        fitting,
        key=lambda space: (
            packed and space.node.node_id in num_chosen,
            -num_chosen.get(space.node.node_id, 0) if workers.strategy == "spread" else 0,
            workers.num_gpus > 0 or space.node.num_gpus == 0,
            space.free_cpus,
        ),
    )


def _refusal(role: str, index: int, workers: WorkerResources, spaces: Sequence[_Space], preset: str) -> str:
    free = "; ".join(space.describe() for space in spaces) or "there is no node"
    if workers.node_labels:
        labelled = [space.node.shown for space in spaces if space.is_labelled(workers)]
        free += f". With the labels {_shown(workers.node_labels)} there is {', '.join(labelled) or 'no node'}"
    custom = f", {_shown(workers.custom_resources)}" if workers.custom_resources else ""
    whole = ""
    if workers.num_gpus > 1:
        split = "resources.rollout.tensor_parallel with it; " if role == "rollout" else ""
        whole = f" ({split}its GPUs are whole ones of one node: shares of other roles take GPUs away from it)"
    return (
        f"resources.{role} asks for {workers.num_workers} workers with {workers.num_cpus:g} CPUs and "
        f"{workers.num_gpus:g} GPUs{custom} each, and worker {index} fits nowhere: {free}. Use a preset smaller than "
        f"resources={preset}, or lower resources.{role}.num_workers, num_cpus or num_gpus{whole}"
    )


def _shown(pairs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs.items())


def _placed(role: str, index: int, workers: WorkerResources, node: NodeResources, seat: int) -> PlacedWorker:
    return PlacedWorker(
        node_name=node.shown,
        role=role,
        index=index,
        node_id=node.node_id,
        num_cpus=workers.num_cpus,
        num_gpus=workers.num_gpus,
        num_threads=workers.num_threads,
        custom=tuple(workers.custom_resources.items()),
        cores=_cores(role, workers, node, seat) if workers.bind_cores else (),
    )


def _cores(role: str, workers: WorkerResources, node: NodeResources, seat: int) -> tuple[int, ...]:
    """Returns the cores of the `seat`-th worker of its node. Indices wrap around after the last core."""
    if workers.num_threads > node.num_cores:
        raise PlacementError(
            f"resources.{role}.num_threads={workers.num_threads} with bind_cores=true, but {node.shown} has "
            f"{node.num_cores} cores: set resources.{role}.num_threads={max(1, node.num_cores)} or "
            f"resources.{role}.bind_cores=false"
        )
    first = workers.first_core + seat * workers.num_threads
    return tuple((first + offset) % node.num_cores for offset in range(workers.num_threads))
