"""Check of the package that `policy.attention` needs."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import RunConfig
from deploy.preflight.findings import PreflightFinding
from deploy.preflight.loaded import LoadedModel
from learner.policies.attention.packed import missing_package


def check_attention(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Whether the kernels of `policy.attention` are installed here."""
    attention = config.policy.attention
    if package := missing_package(attention):
        yield PreflightFinding(
            "policy.attention",
            f"policy.attention={attention} needs the package {package}, which is not installed",
            "install it, or set policy.attention=sdpa, which computes packed rows with torch's own kernel",
        )
