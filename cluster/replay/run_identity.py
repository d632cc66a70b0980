"""The configuration keys that must not change between the parts of one run."""

from __future__ import annotations

from typing import Any

from configs.schema.run import RunConfig


def run_identity(config: RunConfig) -> dict[str, Any]:
    """The dotted keys that must not change between the parts of one run, with their values as JSON."""
    teacher = config.algorithm.distillation.teacher
    return {
        "seed": config.seed,
        "policy.model": config.policy.model,
        "policy.freeze": list(config.policy.freeze),
        "data.kind": config.data.kind.value,
        "data.path": str(config.data.path),
        "learner.backend": config.learner.backend,
        "resources.dtype": config.resources.dtype,
        **({"algorithm.distillation.teacher": teacher} if teacher else {}),
        **({"offline.job": config.offline.job} if config.offline.is_on else {}),
    }
