"""Rules of the resources."""

from __future__ import annotations

from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.resources import REWARD_SERVICE
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.configs.schema.run import RunConfig

COMPUTING_ROLES = ("rollout", "learner", "reference")
TRANSPORT_ROLES = ("rollout", "learner")


def _an_engine_has_a_gpu_for_each_of_its_ranks(config: RunConfig) -> str | None:
    rollout = config.resources.rollout
    if rollout.tensor_parallel == 1:
        return None
    if config.resources.device == "cpu" or config.sampler.kind != "vllm":
        return (
            f"resources.rollout.tensor_parallel={rollout.tensor_parallel} needs vLLM on GPUs, got sampler.kind="
            f"{config.sampler.kind} and resources.device={config.resources.device}: set it to 1, or choose both"
        )
    if rollout.num_gpus != rollout.tensor_parallel:
        return (
            f"resources.rollout.tensor_parallel={rollout.tensor_parallel} splits an engine over as many GPUs, and "
            f"resources.rollout.num_gpus={rollout.num_gpus:g}: set resources.rollout.num_gpus={rollout.tensor_parallel}"
        )
    if config.resources.colocated:
        return (
            f"resources.rollout.tensor_parallel={rollout.tensor_parallel} books whole GPUs, of which "
            "resources.colocated=true has none left for the learner: set resources.colocated=false, or "
            "resources.rollout.tensor_parallel=1 and a share as resources.rollout.num_gpus"
        )
    return None


def _services_have_workers(config: RunConfig) -> str | None:
    own = config.resources.reward_services
    known = [SHARED_SERVICE, *own]
    missing = [name for name in config.rewards.services if name not in known]
    if missing:
        return (
            f"rewards.components use the service {missing[0]}, which has no workers: give "
            f"resources.reward_services.{missing[0]} some, or use one of {', '.join(known)}"
        )
    idle = [name for name in own if name not in config.rewards.services]
    if idle:
        return (
            f"resources.reward_services.{idle[0]} has workers that no component uses: name it as some "
            "rewards.components.INDEX.service, or leave it out"
        )
    return None


def _roles_have_workers(config: RunConfig) -> str | None:
    shared = (SHARED_SERVICE,) if SHARED_SERVICE in config.rewards.services else ()
    needed = (
        "rollout",
        *config.algorithm.training_roles,
        *shared,
        *(f"{REWARD_SERVICE}{name}" for name in config.resources.reward_services),
    )
    empty = [role for role in needed if config.resources.roles[role].num_workers == 0]
    if not empty:
        return None
    keys = ", ".join(f"resources.{role}.num_workers" for role in empty)
    return f"{keys} is 0, and no run works without these roles: set it to 1 or more"


def _gpus_are_whole_or_shares(config: RunConfig) -> str | None:
    for role, workers in config.resources.roles.items():
        num_gpus = workers.num_gpus
        if num_gpus > 1 and not num_gpus.is_integer():
            return (
                f"resources.{role}.num_gpus={num_gpus:g}: Ray books a share of one GPU or a whole number of them, "
                f"so set resources.{role}.num_gpus={int(num_gpus)} or {int(num_gpus) + 1}"
            )
    return None


def _device_has_its_gpus(config: RunConfig) -> str | None:
    resources = config.resources
    used = COMPUTING_ROLES if config.needs_reference else TRANSPORT_ROLES
    for role in (*used, *(("critic",) if config.algorithm.critic.has_own_ranks else ())):
        num_gpus = resources.roles[role].num_gpus
        if resources.device == "cuda" and num_gpus == 0:
            return (
                f"resources.device=cuda but resources.{role}.num_gpus=0, so {role} would see no GPU: "
                f"set resources.{role}.num_gpus=1 or resources.device=cpu"
            )
        if resources.device == "cpu" and num_gpus > 0:
            return (
                f"resources.device=cpu but resources.{role}.num_gpus={num_gpus:g} would be booked for nothing: "
                f"set resources.{role}.num_gpus=0, or use a GPU preset such as resources=two_gpu"
            )
    return None


def _nccl_members_have_their_own_gpu(config: RunConfig) -> str | None:
    if config.resources.transport != "nccl" or config.resources.device != "cuda":
        return None
    for role in TRANSPORT_ROLES:
        num_gpus = config.resources.roles[role].num_gpus
        if 0 < num_gpus <= 0.5:
            return (
                f"resources.{role}.num_gpus={num_gpus:g} lets two members of one NCCL group share a GPU, "
                f"which NCCL refuses: set resources.{role}.num_gpus=1 or resources.transport=gloo"
            )
    return None


RULES: tuple[Rule, ...] = (
    _an_engine_has_a_gpu_for_each_of_its_ranks,
    RuleRow(
        lambda c: c.resources.colocated and c.algorithm.max_staleness != 0,
        "resources.colocated=true lets engines and learner take turns, but algorithm.max_staleness="
        "{algorithm.max_staleness} has them run at the same time: set algorithm.max_staleness=0, or a preset with "
        "devices for both",
    ),
    _services_have_workers,
    _roles_have_workers,
    RuleRow(
        lambda c: c.resources.colocated and c.resources.sleep_level != 1 and c.weight_sync.payload == "adapters",
        "resources.sleep_level={resources.sleep_level} discards the weights of a sleeping engine, and a push with "
        "weight_sync.payload=adapters brings only the layers with adapters: set resources.sleep_level=1 or "
        "weight_sync.payload=weights",
    ),
    RuleRow(
        lambda c: any(role.num_workers % c.resources.num_nodes for role in (c.resources.learner, c.resources.rollout)),
        "resources.num_nodes={resources.num_nodes} but resources.learner.num_workers={resources.learner.num_workers} "
        "and resources.rollout.num_workers={resources.rollout.num_workers}: choose resources=multi_node, which counts "
        "its workers by nodes, or leave resources.num_nodes out",
    ),
    _gpus_are_whole_or_shares,
    _device_has_its_gpus,
    RuleRow(
        lambda c: c.resources.transport == "nccl" and c.resources.device == "cpu",
        "resources.transport=nccl moves weights between GPUs but resources.device=cpu: set resources.transport=gloo",
    ),
    _nccl_members_have_their_own_gpu,
)
