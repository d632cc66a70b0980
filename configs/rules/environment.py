"""Rules of the environment."""

from __future__ import annotations

from mobula.configs.schema.data import DataKind
from mobula.configs.schema.run import RunConfig


def _environment_has_its_data(config: RunConfig) -> str | None:
    environment, kind = config.environment, config.data.kind
    if environment.is_on == (kind is DataKind.ENVIRONMENT) and not (environment.is_on and config.offline.is_on):
        return None
    if environment.is_on:
        return (
            f"environment.name={environment.name} makes the prompts of RL, but data.kind={kind} and offline.job="
            f"{config.offline.job}: set data=environment and offline.job=none, or environment=none"
        )
    return "data.kind=environment needs an environment: set environment=OPTION, or another data.kind"


def _episodes_fit(config: RunConfig) -> str | None:
    environment = config.environment
    if not environment.is_on:
        return None
    longest = config.data.max_prompt_tokens + environment.max_tokens
    if longest > config.sampler.max_model_len:
        return (
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + environment.max_tokens={environment.max_tokens} "
            f"= {longest} is more than sampler.max_model_len={config.sampler.max_model_len}: set "
            f"sampler.max_model_len={longest} or lower one of the two"
        )
    if config.question_suffix:
        return (
            f"data.prompt_suffix={config.data.prompt_suffix!r} is put behind questions, and environment.name="
            f"{environment.name} makes whole prompts: set data.prompt_suffix=''"
        )
    sampler = config.sampler
    if sampler.first_token_temperature > 0 or sampler.stop_strings:
        return (
            f"environment.name={environment.name} samples every turn at one temperature until its end: set "
            "sampler.first_token_temperature=0 sampler.stop_strings=[]"
        )
    return None


def _stages_are_a_curriculum(config: RunConfig) -> str | None:
    curriculum = config.environment.curriculum
    if curriculum.is_on == (len(curriculum.stages) > 1):
        return None
    if curriculum.is_on:
        return (
            f"environment.curriculum.kind={curriculum.kind} has {len(curriculum.stages)} stages to open: give 2 or "
            "more in environment.curriculum.stages, or set environment.curriculum.kind=none"
        )
    return (
        f"environment.curriculum.stages has {len(curriculum.stages)} stages and environment.curriculum.kind=none opens "
        "none: set environment.curriculum.kind=success, or leave the stages out"
    )


def _remote_environment_has_a_server(config: RunConfig) -> str | None:
    environment = config.environment
    if not environment.is_on or environment.host != "remote" or environment.url.startswith(("http://", "https://")):
        return None
    return (
        f"environment.host=remote asks a server, and environment.url={environment.url!r} is none: set it to the URL "
        "that `mobula serve-environment` prints"
    )


RULES = (
    _environment_has_its_data,
    _episodes_fit,
    _stages_are_a_curriculum,
    _remote_environment_has_a_server,
)
