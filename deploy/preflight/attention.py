"""Checks of `policy.attention`, `learner.packing` and `learner.sequence_parallel` with the model."""

from __future__ import annotations

from collections.abc import Iterator

from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.learner.policies.attention.packed import missing_package
from mobula.learner.policies.families import family_at, model_type_at


def check_attention(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the kernels of `policy.attention` are installed."""
    attention = config.policy.attention
    if package := missing_package(attention):
        yield PreflightFinding(
            "policy.attention",
            f"policy.attention={attention} needs the package {package}, which is not installed",
            "install it, or set policy.attention=sdpa, which computes packed rows with torch's own kernel",
        )


def check_packing(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the model separates packed rows, and that ranks can share the tokens of rows."""
    values = {
        "learner.packing": (config.learner.packing, False),
        "learner.sequence_parallel": (config.learner.sequence_parallel, 1),
    }
    if not loaded.chat or family_at(str(loaded.folder)).keeps_packed_rows_apart:
        return
    for key, (value, off) in values.items():
        if value != off:
            yield PreflightFinding(
                key,
                f"{key}={str(value).lower()}, and layers of a {model_type_at(str(loaded.folder))} (policy.model="
                f"{config.policy.model}) carry a state from token to token",
                f"set {key}={str(off).lower()}",
            )
