"""Settings with which a run that does not fit would fit: each one is tried on the plan before it is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from mobula.cluster.errors import PreflightError
from mobula.configs.load import resolved
from mobula.configs.overrides import groups, merge, own_values
from mobula.configs.rules import checked
from mobula.configs.schema import ResourcesConfig, RunConfig, SamplerKind
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.fit import plan_memory
from mobula.deploy.planning.memory import checkpointing, sequence_bytes
from mobula.learner.policies.shapes import ModelShape

NUM_SHOWN = 3
MOST_TOGETHER = 4  # settings in one proposal
LEAST_SEQUENCES = 4  # of the longest length, in a KV cache that is proposed
ADAPTER_RANK = 16

Setting = Mapping[str, Any]  # key -> value, or group -> option


def remedies(
    config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], roles: Sequence[str] | None = None
) -> list[str]:
    """Returns up to three proposals, each a list of overrides; the shortest first. `roles` are as in `plan_memory`."""
    proposals: list[Setting] = []
    settings = list(_settings(config, shape, nodes))
    for number in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(settings, number):
            merged = {key: value for setting in chosen for key, value in setting.items()}
            if len(merged) < sum(map(len, chosen)) or any(
                set(proposal.items()) <= set(merged.items()) for proposal in proposals
            ):
                continue  # two values for one key, or no less than what suffices already
            if _fits(config, shape, nodes, merged, roles):
                proposals.append(merged)
            if len(proposals) == NUM_SHOWN:
                return [words(setting) for setting in proposals]
        if proposals and number > 1:  # there are thousands of triples, and each is planned
            break
    return [words(setting) for setting in proposals]


def words(setting: Setting) -> str:
    """Formats a setting as command-line overrides; an override of a group replaces an earlier one."""
    return " ".join(f"{key}={_word(value)}" for key, value in setting.items())


def changed(config: RunConfig, setting: Setting) -> RunConfig:
    """Returns the configuration with changed values; groups are applied first."""
    values = config.model_dump(mode="json")
    for group in groups().keys() & setting.keys():
        merge(values, own_values(group, setting[group]))
    for key, value in setting.items():
        if key in groups():
            continue
        *parents, last = key.split(".")
        section = values
        for part in parents:
            section = section[part]
        section[last] = value
    # Presets count their workers by nodes: `${times:${resources.num_nodes},4}`.
    values |= resolved({"resources": values["resources"]})
    return checked(RunConfig.model_validate_json(json.dumps(values), strict=True))


def _fits(
    config: RunConfig,
    shape: ModelShape,
    nodes: Sequence[PlannedNode],
    setting: Setting,
    roles: Sequence[str] | None,
) -> bool:
    try:
        return not plan_memory(changed(config, setting), shape, nodes, roles).shortfalls
    except (ValueError, PreflightError):  # the sections contradict, or the model lacks what the setting names
        return False


def _settings(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
    """Single settings that save memory, those that change least of the training first."""
    learner, resources = config.learner, config.resources
    if checkpointing(config) == "none":
        yield CHECKPOINTING
    yield from _of_roles(config, nodes)
    longest = config.data.max_prompt_tokens + config.sampler.max_tokens
    serves_adapters = config.sampler.adapters.are_on  # the training service has no reference, and trains adapters
    is_service = serves_adapters or config.training_service.weights == "full"  # or all weights
    if learner.backend != "single" and not (config.sampler.is_flow or is_service):
        yield {"learner.sequence_parallel": 2 * learner.sequence_parallel}
    tokens = learner.tokens_per_microbatch // 2
    while tokens >= longest:
        yield {"learner.tokens_per_microbatch": tokens}
        tokens //= 4
    if tokens < longest < learner.tokens_per_microbatch:
        yield {"learner.tokens_per_microbatch": longest}
    least = LEAST_SEQUENCES * sequence_bytes(config, shape, config.sampler.max_model_len)
    shares = (config.sampler.vllm.kv_cache_bytes // n for n in (2, 4, 8) if config.sampler.kind is SamplerKind.VLLM)
    yield from ({"sampler.vllm.kv_cache_bytes": share} for share in shares if share >= least)
    if learner.backend == "deepspeed" and learner.zero_stage == 2:
        yield {"learner.zero_stage": 3}
    if serves_adapters:
        return
    if resources.reference.num_gpus < 1 and config.needs_reference and not is_service:
        yield {"resources.reference.num_gpus": 1.0}
    if config.needs_reference and not (config.algorithm.distillation.is_on or is_service):
        # The learner's ranks shard the frozen weights; a scorer holds a whole model.
        adapters = {} if config.policy.lora.is_on else {"policy.lora.rank": ADAPTER_RANK}
        yield {**adapters, "reference.place": "learner_ranks"}
        yield {"algorithm.kl.coef": 0.0}
    if shape.vision is not None and not config.policy.freeze:
        yield {"policy.freeze": ("visual.",)}
    if not (config.policy.lora.is_on or is_service):
        yield {"policy.lora.rank": ADAPTER_RANK}


def _of_roles(config: RunConfig, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
    """Other numbers of workers, and other presets of the same device."""
    learner, resources = config.learner, config.resources
    for preset in _presets(resources):
        counted = {"resources.num_nodes": len(nodes)} if "num_nodes" in _own(preset) else {}
        yield {"resources": preset, **counted}
    if resources.device == "cpu" and len(nodes) == 1:  # ranks on one node share its memory: one needs least
        if learner.backend != "single":
            yield {
                "learner": "single",
                **({"resources.learner.num_workers": 1} if resources.learner.num_workers > 1 else {}),
            }
            yield {"learner": "single"}
    elif learner.backend != "single":
        for number in (resources.learner.num_workers + 1, resources.learner.num_workers * 2):
            yield {"resources.learner.num_workers": number}
    if resources.learner.num_gpus < 1 and resources.device == "cuda":
        yield {"resources.learner.num_gpus": 1.0}
    for number in (resources.rollout.num_workers - 1, resources.rollout.num_workers // 2):
        if number > 0:
            yield {"resources.rollout.num_workers": number}


def _presets(resources: ResourcesConfig) -> Iterator[str]:
    """Presets of the same device that start or use the same cluster, those with two names once."""
    seen = [_own(resources.preset)] if resources.preset in groups()["resources"] else []
    for preset in groups()["resources"]:
        values = _own(preset)
        if values.get("device", "cpu") == resources.device and "address" not in values and values not in seen:
            seen.append(values)
            yield preset


def _own(preset: str) -> dict[str, Any]:
    """The values of a preset below `resources`, without its name."""
    return {key: value for key, value in own_values("resources", preset)["resources"].items() if key != "preset"}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


CHECKPOINTING: Setting = {"learner.activation_checkpointing": "blocks"}
