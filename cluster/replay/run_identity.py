"""The configuration keys that must not change between the parts of one run."""

from __future__ import annotations

from typing import Any

from configs.schema.environment import EnvironmentConfig
from configs.schema.run import RunConfig

# Each of them changes which row has which place in the order.
ORDER_KEYS = (
    "row_format",
    "sources",
    "temperature",
    "weight_by_rows",
    "curriculum",
    "shuffle_bytes",
    "max_checked_rows",
)


def run_identity(config: RunConfig) -> dict[str, Any]:
    """The dotted keys that must not change between the parts of one run, with their values as JSON."""
    supervised = config.algorithm.supervised
    environment = config.environment
    teacher, teachers = config.algorithm.distillation.teacher, config.algorithm.distillation.teachers
    return {
        "seed": config.seed,
        "policy.model": config.policy.model,
        "policy.freeze": list(config.policy.freeze),
        "data.kind": config.data.kind.value,
        "data.path": str(config.data.path),
        **{f"data.{key}": value for key, value in config.data.model_dump(mode="json", include=set(ORDER_KEYS)).items()},
        **(_episodes(environment) if environment.is_on else {}),
        "learner.backend": config.learner.backend,
        "resources.dtype": config.resources.dtype,
        **({"algorithm.distillation.teacher": teacher} if teacher else {}),
        **({"algorithm.distillation.teachers": teachers} if teachers else {}),
        **({"algorithm.supervised": [supervised.path, supervised.max_tokens]} if supervised.is_on else {}),
        **({"offline.job": config.offline.job} if config.offline.is_on else {}),
    }


def _episodes(environment: EnvironmentConfig) -> dict[str, Any]:
    """Which seed and which stage has which place in the order."""
    return {
        "environment.name": environment.name,
        "environment.num_train": environment.num_train,
        "environment.curriculum.stages": [dict(stage) for stage in environment.curriculum.stages],
    }
