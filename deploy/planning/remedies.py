"""Settings with which a run that does not fit would fit: each one is tried on the plan before it is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from cluster.errors import PreflightError
from configs.schema import RunConfig
from deploy.planning.activations import checkpointing
from deploy.planning.clusters import PlannedNode
from deploy.planning.fit import plan_memory
from learner.policies.shapes import ModelShape

NUM_SHOWN = 3
MOST_TOGETHER = 4  # settings in one proposal
LEAST_KV_CACHE = 2**30
ADAPTER_RANK = 16

Setting = Mapping[str, Any]  # key -> value


def remedies(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode]) -> list[str]:
    """Up to three proposals, each the words to add to the command, those with fewest words first."""
    found: list[Setting] = []
    settings = list(_settings(config, shape))
    for number in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(settings, number):
            merged = {key: value for setting in chosen for key, value in setting.items()}
            if len(merged) < sum(map(len, chosen)) or any(set(one.items()) <= set(merged.items()) for one in found):
                continue  # two values for one key, or no less than what suffices already
            if _fits(config, shape, nodes, merged):
                found.append(merged)
            if len(found) == NUM_SHOWN:
                return [words(setting) for setting in found]
    return [words(setting) for setting in found]


def words(setting: Setting) -> str:
    """As they are given on the command line."""
    return " ".join(f"{key}={_word(value)}" for key, value in setting.items())


def changed(config: RunConfig, setting: Setting) -> RunConfig:
    """The configuration with other values.

    Raises:
        ValidationError: its sections contradict each other then.
    """
    values = config.model_dump(mode="json")
    for key, value in setting.items():
        *way, last = key.split(".")
        section = values
        for part in way:
            section = section[part]
        section[last] = value
    return RunConfig.model_validate_json(json.dumps(values), strict=True)


def _fits(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], setting: Setting) -> bool:
    try:
        return not plan_memory(changed(config, setting), shape, nodes).shortfalls
    except (ValueError, PreflightError):  # the sections contradict, or the model lacks what the setting names
        return False


def _settings(config: RunConfig, shape: ModelShape) -> Iterator[Setting]:
    """Single settings that save memory, those that change least of the training first."""
    learner, resources, sampler = config.learner, config.resources, config.sampler
    if checkpointing(config) == "none":
        yield CHECKPOINTING
    longest = config.data.max_prompt_tokens + sampler.max_tokens
    tokens = learner.tokens_per_microbatch // 2
    while tokens >= longest:
        yield {"learner.tokens_per_microbatch": tokens}
        tokens //= 4
    if tokens < longest < learner.tokens_per_microbatch:
        yield {"learner.tokens_per_microbatch": longest}
    for share in (2, 4):
        if sampler.kv_cache_bytes // share >= LEAST_KV_CACHE:
            yield {"sampler.kv_cache_bytes": sampler.kv_cache_bytes // share}
    if learner.backend == "deepspeed" and learner.zero_stage == 2:
        yield {"learner.zero_stage": 3}
    for number in (resources.learner.num_workers + 1, resources.learner.num_workers * 2):
        if learner.backend != "single":
            yield {"resources.learner.num_workers": number}
    if resources.learner.num_gpus < 1:
        yield {"resources.learner.num_gpus": 1.0}
    if resources.reference.num_gpus < 1 and config.needs_reference:
        yield {"resources.reference.num_gpus": 1.0}
    for number in (resources.rollout.num_workers - 1, resources.rollout.num_workers // 2):
        if number > 0:
            yield {"resources.rollout.num_workers": number}
    if config.needs_reference and not config.algorithm.distillation.is_on:
        yield {"algorithm.kl.coef": 0.0}
    if shape.vision is not None and not config.policy.freeze:
        yield {"policy.freeze": ("visual.",)}
    if not config.policy.lora.is_on:
        yield {"policy.lora.rank": ADAPTER_RANK}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


CHECKPOINTING: Setting = {"learner.activation_checkpointing": "blocks"}
