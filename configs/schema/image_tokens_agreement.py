"""What a run that draws pictures token by token (`sampler.kind=image_tokens`) cannot be asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema.run import RunConfig

Rule = Callable[["RunConfig"], str | None]


def _nothing_reads_text(config: RunConfig) -> str | None:
    """Parts of a run that take the tokens of a response for text, or compute a policy of text."""
    if not config.sampler.draws_tokens:
        return None
    algorithm, sampler = config.algorithm, config.sampler
    asked = {
        "algorithm.advantage of a critic": (algorithm.critic.is_on, "algorithm.advantage=grpo"),
        "algorithm.distillation.teacher": (algorithm.distillation.is_on, "no teacher"),
        "algorithm.kl.coef": (algorithm.kl.coef > 0, "algorithm.kl.coef=0"),
        "resources.reference.num_workers": (
            config.resources.reference.num_workers > 0,
            "resources.reference.num_workers=0",
        ),
        "sampler.top_p, top_k or min_p": (sampler.is_cut, "sampler.top_p=1 sampler.top_k=0 sampler.min_p=0"),
        "sampler.first_token_temperature": (
            sampler.first_token_temperature > 0,
            "sampler.first_token_temperature=0",
        ),
        "sampler.stop_strings": (bool(sampler.stop_strings), "sampler.stop_strings=[]"),
        "warm_start.num_steps": (config.warm_start.num_steps > 0, "warm_start=none"),
        "environment.name": (config.environment.is_on, "environment=none"),
        "offline.job": (config.offline.is_on, "offline.job=none"),
    }
    refused = [f"{key} (set {instead})" for key, (is_asked, instead) in asked.items() if is_asked]
    return f"sampler.kind=image_tokens has no use for {', '.join(refused)}" if refused else None


IMAGE_TOKEN_RULES: tuple[Rule, ...] = (_nothing_reads_text,)
