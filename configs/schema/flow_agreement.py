"""What a run of a flow model (`sampler.kind=flow`) cannot be asked for, one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema.run import RunConfig

Rule = Callable[["RunConfig"], str | None]


def _kl_has_a_reference(config: RunConfig) -> str | None:
    kl, lora = config.algorithm.kl, config.policy.lora
    if not config.sampler.is_flow or kl.coef == 0 or (lora.is_on and kl.place == "loss"):
        return None
    return (
        f"algorithm.kl.coef={kl.coef:g} compares a flow model with itself without adapters, in the loss: set "
        "policy.lora.rank above 0 and algorithm.kl.place=loss, or algorithm.kl.coef=0"
    )


def _window_lies_in_the_schedule(config: RunConfig) -> str | None:
    flow = config.sampler.flow
    last = flow.num_steps - 1 if flow.kernel == "cps" else flow.num_steps  # the last step of cps adds no noise
    if not config.sampler.is_flow or flow.window_start < flow.window_end <= last:
        return None
    return (
        f"sampler.flow.window_start={flow.window_start} and sampler.flow.window_end={flow.window_end} are not the "
        f"bounds of steps within the first {last} of {flow.num_steps}: set window_start < window_end <= {last}"
    )


def _nothing_reads_tokens(config: RunConfig) -> str | None:
    """Parts of a run that look at token ids or at a distribution over tokens."""
    if not config.sampler.is_flow:
        return None
    algorithm = config.algorithm
    asked = {
        "algorithm.advantage of a critic": (algorithm.critic.is_on, "algorithm.advantage=grpo"),
        "algorithm.distillation.teacher": (algorithm.distillation.is_on, "no teacher"),
        "algorithm.entropy.bonus": (algorithm.entropy.bonus > 0, "algorithm.entropy.bonus=0"),
        "algorithm.entropy.top_share": (algorithm.entropy.top_share < 1, "algorithm.entropy.top_share=1"),
        "algorithm.shaping.repetition_penalty": (
            algorithm.shaping.repetition_penalty > 0,
            "algorithm.shaping.repetition_penalty=0",
        ),
        "sampler.temperature": (config.sampler.temperature != 1, "sampler.temperature=1"),
        "policy.freeze": (bool(config.policy.freeze), "policy.freeze=[]"),
        "warm_start.num_steps": (config.warm_start.num_steps > 0, "warm_start=none"),
        "environment.name": (config.environment.is_on, "environment=none"),
        "offline.job": (config.offline.is_on, "offline.job=none"),
        "resources.reference.num_workers": (
            config.resources.reference.num_workers > 0,
            "resources.reference.num_workers=0",
        ),
        "learner.activation_checkpointing=blocks_offloaded": (
            config.learner.activation_checkpointing == "blocks_offloaded",
            "learner.activation_checkpointing=blocks",
        ),
    }
    refused = [f"{key} (set {instead})" for key, (is_asked, instead) in asked.items() if is_asked]
    return f"sampler.kind=flow has no use for {', '.join(refused)}" if refused else None


FLOW_RULES: tuple[Rule, ...] = (_kl_has_a_reference, _window_lies_in_the_schedule, _nothing_reads_tokens)
